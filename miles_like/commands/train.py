"""`miles-like train`, `demo` and `init`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.options import (
    CacheOption,
    DryRunOption,
    ForceOption,
    FreshOption,
    FromStepOption,
    FuseOption,
    ProfileOption,
    RayOption,
    ResumeOption,
    RunDirOption,
    SetOption,
    ShowConfigOption,
    SuperviseOption,
    profile_settings,
)
from miles_like.commands.output import console, echo
from miles_like.pipeline.stage_names import STAGES

if TYPE_CHECKING:
    from miles_like.config.sections.loop import CheckpointConfig


def train(
    config: Path,
    run_dir: RunDirOption,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
    fuse: FuseOption = False,
    resume: ResumeOption = False,
    from_step: FromStepOption = None,
    fresh: FreshOption = False,
    dry_run: DryRunOption = False,
    show_config: ShowConfigOption = False,
    ray_address: RayOption = None,
    cache_dir: CacheOption = None,
    force: ForceOption = False,
    supervise: SuperviseOption = False,
    profile: ProfileOption = None,
    stages: Annotated[str, typer.Option("--stages", hidden=True)] = ",".join(STAGES),  # of scripts/run_deepseek.py
) -> None:
    """Train a model: fetch, dequantize, convert and stage the checkpoint, then train."""
    with one_sentence(run_dir / "logs"):
        from miles_like.config.load import load_config

        # a mistyped key is answered before the libraries of training are imported
        overrides = [*overrides, *profile_settings(profile)]
        settings = load_config(config, overrides).checkpoint
        if supervise and not dry_run:
            raise typer.Exit(_supervised(run_dir, settings))
        from miles_like.run.pipeline import PipelineOptions, run_pipeline

        options = PipelineOptions(
            overrides=overrides,
            stages=stages,
            fuse=fuse,
            resume=resume,
            from_step=from_step,
            fresh=fresh,
            dry_run=dry_run,
            show_config=show_config,
            ray_address=ray_address,
            cache_dir=cache_dir,
            force=force,
        )
        run_pipeline(config, run_dir, options, console())


def _supervised(run_dir: Path, settings: CheckpointConfig) -> int:
    """Runs this command's words without `--supervise` in a process that is started again; the status."""
    from miles_like.launch.supervise import Restarts, Supervisor, command_line

    limits = Restarts(most=settings.restarts, window_s=settings.restart_window_s, wait_s=settings.restart_wait_s)

    def say(text: str) -> None:
        typer.echo(f"supervise: {text}", err=True)

    return Supervisor(words=command_line(), run_dir=run_dir, restarts=limits, say=say).run()


# what `demo --device cuda` sets: one trainer rank and the embedded engine take turns on one GPU, without
# TransformerEngine
_ON_A_GPU = (
    "cluster.gpus_per_node=1",
    "parallel.dp=1",
    "parallel.ep=1",
    "kernels.spec=local",
    "rollout.embedded.device=cuda",
)


def demo(
    run_dir: RunDirOption = Path("runs/demo"),
    device: Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="cuda: on one GPU")] = "cpu",
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
    resume: ResumeOption = False,
    fresh: FreshOption = False,
    dry_run: DryRunOption = False,
    show_config: ShowConfigOption = False,
) -> None:
    """Train a tiny model on two CPU cores, or on one GPU, in all five stages, with the installed configuration."""
    train(
        Path("tiny"),
        run_dir,
        overrides=[*(_ON_A_GPU if device == "cuda" else ()), *overrides],
        resume=resume,
        fresh=fresh,
        dry_run=dry_run,
        show_config=show_config,
    )


def init(
    directory: Path,
    task: Annotated[str, typer.Option("--task", help="kind of task: qa, tool, agent, distill or sft")] = "qa",
) -> None:
    """Write a starting configuration, data and functions, which run unchanged with a tiny model."""
    with one_sentence():
        from miles_like.config.templates import TASKS, write_template

        written = write_template(directory, task)
        echo(f"{task}: {TASKS[task]}")
        for path in written:
            echo(f"-> {path}")
        echo(f"Next: miles-like train {directory / 'config.toml'} --run-dir runs/{directory.resolve().name}")

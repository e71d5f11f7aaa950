"""`miles-like train` and `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.options import (
    CacheOption,
    DryRunOption,
    ForceOption,
    FreshOption,
    FromStepOption,
    FuseOption,
    RayOption,
    ResumeOption,
    RunDirOption,
    SetOption,
)
from miles_like.commands.output import console
from miles_like.pipeline.stage_names import STAGES

DEMO = Path(__file__).resolve().parents[1] / "demo_files" / "tiny.toml"


def train(
    config: Path,
    run_dir: RunDirOption,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
    fuse: FuseOption = False,
    resume: ResumeOption = False,
    from_step: FromStepOption = None,
    fresh: FreshOption = False,
    dry_run: DryRunOption = False,
    ray_address: RayOption = None,
    cache_dir: CacheOption = None,
    force: ForceOption = False,
    stages: Annotated[str, typer.Option("--stages", hidden=True)] = ",".join(STAGES),  # of scripts/run_deepseek.py
) -> None:
    """Run all five stages of a configuration, which ends in a trained model."""
    with one_sentence(run_dir / "logs"):
        from miles_like.run.pipeline import PipelineOptions, run_pipeline

        options = PipelineOptions(
            overrides=overrides,
            stages=stages,
            fuse=fuse,
            resume=resume,
            from_step=from_step,
            fresh=fresh,
            dry_run=dry_run,
            ray_address=ray_address,
            cache_dir=cache_dir,
            force=force,
        )
        run_pipeline(config, run_dir, options, console())


def demo(
    run_dir: RunDirOption = Path("runs/demo"),
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
    resume: ResumeOption = False,
    fresh: FreshOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Train the tiny model on two CPU cores: all five stages, with the configuration and data that are installed."""
    train(DEMO, run_dir, overrides=overrides, resume=resume, fresh=fresh, dry_run=dry_run)

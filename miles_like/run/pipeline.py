"""All five stages of a configuration, or what a dry run prints of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console
from rich.markup import escape

from miles_like.check_results import CheckResult, describe_unchecked, raise_failures
from miles_like.checkpoint.run_state import check_kept
from miles_like.config.load import ConfigSource, Override, load_config, read_tree
from miles_like.config.run import RunConfig
from miles_like.config.settings import as_toml, read_settings
from miles_like.pipeline.cache import describe_cache
from miles_like.pipeline.run_directory import Mode, check_run_dir
from miles_like.pipeline.stage_names import STAGES
from miles_like.pipeline.stages import (
    Stage,
    parse_stages,
    plan_stages,
    run_stages,
    stages_to_do,
)
from miles_like.plugins import GIVEN
from miles_like.preflight.describe import describe_plan
from miles_like.run import assemble
from miles_like.run.setup.model_plan import PlannedModel
from miles_like.run.setup.run_cluster import RunCluster, on_every_node
from miles_like.variables import ray_address

_PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The options of `miles-like train`."""

    overrides: Sequence[Override] = ()
    """Overrides of configuration keys."""
    stages: str = ",".join(STAGES)
    fuse: bool = False
    resume: bool = False
    from_step: int | None = None
    fresh: bool = False
    dry_run: bool = False
    show_config: bool = False
    """With `dry_run`: also the keys that differ from the defaults."""
    ray_address: str | None = None
    cache_dir: Path | None = None
    force: bool = False

    def settings(self) -> list[Override]:
        """The overrides of the configuration that these options are."""
        given: list[Override] = ["convert.fuse=true"] if self.fuse else []
        if self.cache_dir is not None:
            given.append(tomli_w.dumps({"cache_dir": str(self.cache_dir.resolve())}).strip())
        return [*self.overrides, *given]

    def mode(self) -> Mode:
        """Raises ValueError for options that exclude each other."""
        resume = self.resume or self.from_step is not None
        if resume and self.fresh:
            option = "--resume" if self.from_step is None else "--from-step"
            raise ValueError(f"{option} continues a run, but --fresh discards it: pass one of them")
        return "resume" if resume else "fresh" if self.fresh else "auto"


def run_pipeline(config: ConfigSource, run_dir: Path, options: PipelineOptions, console: Console) -> None:
    """Run the stages that are not complete. Raises ValueError, RuntimeError, OSError or MemoryError with a message for
    the user, and `Stopped`."""
    mode = options.mode()
    if options.show_config and not options.dry_run:
        raise ValueError("--show-config has no effect without --dry-run: add --dry-run, or use miles-like config show")
    if options.from_step is not None:
        check_kept(run_dir / "checkpoints", options.from_step)
    loaded = load_config(config, options.settings())
    if mode == "resume":
        _check_given_reward(loaded, run_dir)
    model = assemble.known_model(loaded)
    address = ray_address(options.ray_address)
    run_dir = on_every_node(run_dir, address)
    cluster = RunCluster(loaded, run_dir, console, address)
    functions = assemble.stage_functions(loaded, model, console, cluster, force=options.force)
    planned = plan_stages(loaded, run_dir, functions, mode=mode, from_step=options.from_step)
    selected = parse_stages(options.stages, fuse=loaded.convert.fuse)
    if "train" in (to_do := stages_to_do(planned, selected, fresh=options.fresh)):
        check_run_dir(run_dir, mode)
    if options.dry_run:
        checks = functions.preflight(planned, to_do, False).run()
        raise_failures(checks)
        lines = describe_plan(loaded, functions.sizes, planned, to_do, joins_cluster=functions.joins_cluster)
        for line in [*lines, *assemble.describe_memory(loaded, model)]:
            console.print(line, **_PLAIN)
        console.print()
        print_stages(console, loaded, model, planned, selected, run_dir)
        if options.show_config:
            console.print("\n".join(["", *as_toml(read_settings(config, options.settings()))]), **_PLAIN)
        print_not_checked(console, checks)
        return
    console.print(f"[bold]{'cache':>10}[/]  {escape(describe_cache(loaded, run_dir))}", soft_wrap=True)
    try:
        run_stages(
            planned,
            selected,
            console,
            fresh=options.fresh,
            preflight=lambda names: functions.preflight(planned, names, True),
        )
    finally:
        assemble.shut_down()


def _check_given_reward(config: RunConfig, run_dir: Path) -> None:
    """Raises ValueError where the run was trained with a function that Python code passed, and `config` has none."""
    reward: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # without a run there is nothing to compare, and the stages report it
        reward = read_tree(run_dir / "config.toml").get("reward", {})
    before = [name for name in (reward.get("name", ""), *reward.get("parts", ())) if name.startswith(GIVEN)]
    if not before or any(name.startswith(GIVEN) for name in config.reward.weights):
        return
    name = before[0].removeprefix(GIVEN).rpartition("-")[0]
    raise ValueError(
        f"{run_dir} was trained with the reward {name!r}, a function that Python code passed to miles_like.train "
        "and that is not in a file: resume the run from Python and pass the function again, "
        "miles_like.train(..., reward=..., resume=True)"
    )


def print_stages(
    console: Console,
    config: RunConfig,
    model: PlannedModel | None,
    planned: list[Stage],
    selected: list[str],
    run_dir: Path,
) -> None:
    """Print each stage's state, directory and bytes; processes and commands."""
    console.print(f"[bold]{'cache':>10}[/]  {escape(describe_cache(config, run_dir))}", soft_wrap=True)
    for stage in planned:
        state = "not selected" if stage.name not in selected else stage.why_not_done()
        unknown = "grows with the steps" if stage.name == "train" else "size known once fetched"
        size = unknown if stage.size is None else f"{stage.size:,} bytes"
        console.print(f"[bold]{stage.name:>10}[/]  {stage.what}", soft_wrap=True)
        done = state or "complete, would be skipped"
        console.print(f"{'':12}{size} -> {stage.directory}  [{done}]", markup=False, soft_wrap=True)
    console.print()
    staged = next(stage.directory for stage in planned if stage.name == "stage")
    for line in assemble.describe_processes(config, run_dir, model, staged):
        console.print(line, **_PLAIN)


def print_not_checked(console: Console, checks: Sequence[CheckResult]) -> None:
    """Print the checks that a dry run cannot make and the run makes before its first stage."""
    lines = describe_unchecked(checks)
    if lines:
        console.print("[bold]not checked by this dry run[/], but by the run before its first stage:")
    for line in lines:
        console.print(f"{'':12}{line}", markup=False, soft_wrap=True)

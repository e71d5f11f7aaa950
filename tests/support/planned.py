"""The stages of a run, planned as its command plans them, with nothing started."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from miles_like.config.run import RunConfig
from miles_like.pipeline.stages import Stage, plan_stages
from miles_like.run import assemble
from miles_like.run.setup.run_cluster import RunCluster


def cluster_of(config: RunConfig, run_dir: Path, address: str | None = None) -> RunCluster:
    return RunCluster(config, run_dir, Console(quiet=True), address)


def planned(config: RunConfig, run_dir: Path) -> list[Stage]:
    model, cluster = assemble.known_model(config), cluster_of(config, run_dir)
    return plan_stages(config, run_dir, assemble.stage_functions(config, model, Console(quiet=True), cluster))

"""What a run needs: memory, disk and the seconds of a step, and the layouts that fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from miles_like.config.run import RunConfig
from miles_like.device_table import Device
from miles_like.device_table import device as named_device
from miles_like.pipeline.stages import plan_stages
from miles_like.planning.compose import IMBALANCE
from miles_like.planning.plan import Plan
from miles_like.planning.table import print_plan, write_plan
from miles_like.run import assemble
from miles_like.run.setup.model_plan import PlannedModel
from miles_like.run.setup.run_cluster import RunCluster
from miles_like.run.step_time import Asked, not_timed, predicted, report, searched
from miles_like.timing.of_run import Facts
from miles_like.timing.step import StepSetup, StepTime
from miles_like.timing.table import print_step

_RUN_DIR = Path("runs/plan")  # nothing is written there


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Assumptions about a run's devices and data; None: the configuration's values, or a share of its limits."""

    device: str | None = None
    imbalance: float | None = None
    prompt: float | None = None
    response: float | None = None
    reward_s: float = 0.0

    @property
    def asked(self) -> Asked:
        return Asked(prompt=self.prompt, response=self.response, reward_s=self.reward_s)

    def on(self, config: RunConfig) -> Device:
        """Raises ValueError for an unknown device."""
        return named_device(config.cluster.device if self.device is None else self.device)

    @property
    def uneven(self) -> float:
        return IMBALANCE if self.imbalance is None else self.imbalance

    def facts(self, config: RunConfig) -> Facts:
        """Raises ValueError."""
        return self.asked.facts(config, self.on(config), self.uneven)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The search's options as the command line has them."""

    nodes: str | None
    by: str | None
    formats: str | None


def search_layouts(
    config: RunConfig,
    path: Path,
    assumed: Predictions,
    how: SearchOptions,
    console: Console,
    *,
    json: Path | None,
    write: Path | None,
) -> bool:
    """Print the fastest or cheapest layouts that fit; returns whether there is one. path: of the configuration. Raises
    ValueError."""
    model = _model(config)
    ranked = searched(config, model, assumed.facts(config), nodes=how.nodes, formats=how.formats, by=how.by)
    report(console, ranked, path, json_path=json, write=write)
    return bool(ranked.found)


def make_plan(config: RunConfig, assumed: Predictions, console: Console) -> Plan:
    """The plan, with the seconds of a step where they can be predicted. Raises ValueError."""
    return _timed(config, _model(config), assumed, console)[0]


def _timed(
    config: RunConfig, model: PlannedModel, assumed: Predictions, console: Console
) -> tuple[Plan, tuple[StepSetup, StepTime] | None]:
    assumed.facts(config)
    cluster = RunCluster(config, _RUN_DIR, console, None)
    stages = plan_stages(config, _RUN_DIR, assemble.stage_functions(config, model, console, cluster), mode="fresh")
    found = assemble.memory_plan(config, model, stages, on=assumed.on(config), imbalance=assumed.uneven)
    timed = predicted(config, model, found, assumed.asked)
    return (found if timed is None else replace(found, step_s=timed[1].flat())), timed


def plan_run(config: RunConfig, assumed: Predictions, console: Console, *, json: Path | None) -> bool:
    """Print the plan; returns whether the run fits. Raises ValueError."""
    model = _model(config)
    found, timed = _timed(config, model, assumed, console)
    print_plan(console, found)
    if timed is not None:
        setup, time = timed
        print_step(console, time, setup)
    if (line := not_timed(config, model, found)) is not None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        write_plan(json, found)
    if not found.fits:
        console.print(assemble.memory_refusal(config, model, found), markup=False, highlight=False, soft_wrap=True)
    return found.fits


def _model(config: RunConfig) -> PlannedModel:
    if (model := assemble.known_model(config)) is None:
        raise ValueError(
            f"model.path = {config.model.path!r} is not on this machine, and planning needs its config.json: set "
            "model.config to the path of a config.json"
        )
    return model

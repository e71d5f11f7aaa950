"""Recorded runs that the simulation is held to (docs/plan/simulation.json, written by benchmarks/simulation.py)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles_like.limits.regular_files import read_json
from miles_like.simulation.calibration import MeasuredStep, calibrated
from miles_like.simulation.figures import SimulationFigures
from miles_like.simulation.inputs.lengths import Answers

RECORD_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Figures of the steps from the publication of step `first` to the last one, as `SimulationFigures` has them."""

    max_staleness: int
    first: int
    steps: int
    step_s: float  # mean from publication to publication
    trainer_idle: float  # share without training and publication
    servers_idle: float  # share without a request
    staleness: Mapping[str, float]  # weight versions -> share of tokens
    cpu_s: Mapping[str, float]  # processor seconds of a step: driver, ranks, servers, ray
    foreign: float  # cores that other processes kept busy, or the host took


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSeries:
    """Runs that differ in buffer.max_staleness. settings: `--set` of configs/tiny.toml. cores: of the machine.
    steps, busy: of the synchronous run, its steps and the cores that all its processes kept busy in each phase."""

    name: str
    settings: Sequence[str]
    made: str  # commit, date, machine, command
    cores: float
    steps: Sequence[MeasuredStep]
    busy: Mapping[str, float]  # "samples", "train", "publish", "other"
    runs: Sequence[MeasuredRun]

    def assumptions(self, *, servers: int, shards: int) -> dict[str, Any]:
        """The tree of `Assumptions`, from the synchronous run alone. What a rollout takes while no request is in flight
        is the driver's work on the replies."""
        (synchronous,) = (run for run in self.runs if not run.max_staleness)
        tree = calibrated(self.steps, servers=servers, shards=shards, one_pass=True)
        rollout_s = statistics.fmean(s.rollout_s for s in self.steps)
        served_s = min((1 - synchronous.servers_idle) * synchronous.step_s, rollout_s)
        samples = statistics.fmean(sum(len(g.lengths) for g in s.groups) for s in self.steps)
        engine = {key: value * served_s / rollout_s for key, value in tree["engine"].items()}
        tree["engine"] = engine | {"reply_s": (rollout_s - served_s) / samples}
        tree["cores"] = self.cores
        for part, phase in (("engine", "samples"), ("train", "train"), ("publish", "publish")):
            tree[part]["cores"] = self.busy[phase]
        return tree

    @property
    def answers(self) -> list[Answers]:
        return [group for step in self.steps for group in step.groups]

    def to_json(self) -> dict[str, Any]:
        out = asdict(self)
        for step in out["steps"]:
            step["groups"] = [[g["prompt_tokens"], *g["lengths"]] for g in step["groups"]]
        return out

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> MeasuredSeries:
        steps = [
            MeasuredStep(**(s | {"groups": tuple(Answers(g[0], tuple(g[1:])) for g in s["groups"])}))
            for s in given["steps"]
        ]
        return cls(**{**given, "steps": steps, "runs": [MeasuredRun(**r) for r in given["runs"]]})


def read_series(path: Path) -> list[MeasuredSeries]:
    """Raises ValueError for a file that is no such record, OSError where it cannot be read."""
    return [MeasuredSeries.from_json(s) for s in read_json(path, RECORD_BYTES)]


def errors(run: MeasuredRun, figures: SimulationFigures) -> dict[str, float]:
    """Of the simulation: of the step time relative to it, of idle shares as a difference of shares."""
    return {
        "step_s": figures["step_s"]["mean"] / run.step_s - 1,
        "trainer_idle": figures["trainer_idle"] - run.trainer_idle,
        "servers_idle": figures["servers_idle"] - run.servers_idle,
    }

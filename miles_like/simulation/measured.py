"""The figures of a measured run, in the form of a simulation's figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from miles_like.simulation.calibration import LAST, WARM
from miles_like.simulation.figures import figures_of, warm_steps
from miles_like.simulation.inputs.assumptions import Assumptions
from miles_like.simulation.inputs.lengths import Answers, RecordedAnswers
from miles_like.simulation.inputs.settings import LoopSettings
from miles_like.simulation.simulate import simulate

DRAWS = 3  # simulations whose mean is taken, each with other draws of the recorded answers


class LoopFigures(TypedDict):
    """step_s: seconds from publication to publication. Shares of the same steps as in `SimulationFigures`."""

    step_s: float
    trainer_idle: float
    servers_idle: float


class Measured(TypedDict):
    """One machine's runs of a configuration with several `buffer.max_staleness`, and what its simulation reads.

    assumptions, answers: of the synchronous run, by `miles_like.simulation.calibration`; an answer is its prompt's
    tokens and its own. runs: by `buffer.max_staleness`.
    """

    machine: str
    config: str
    settings: list[str]
    steps: int
    assumptions: dict[str, Any]
    answers: list[tuple[int, list[int]]]
    runs: dict[str, LoopFigures]


def measured_figures(
    rows: Sequence[Mapping[str, Any]], polled: Sequence[tuple[int, bool]], *, max_staleness: int
) -> LoopFigures:
    """rows: of metrics.jsonl, in whose first nothing was trained yet. Steps that a calibration does not read are not
    counted: caches fill in the first ones, an evaluation precedes the last row. polled: of a server at equal intervals,
    (rows written by then, whether it had no sample). Raises ValueError for a run without enough steps.
    """
    first, last = max(WARM, warm_steps(len(rows) - 1, max_staleness)), len(rows) - 1 - LAST
    if last <= first:
        raise ValueError(
            f"{len(rows)} rows in metrics.jsonl: expected at least {first + 2 + LAST} with staleness {max_staleness}"
        )
    seconds = float(rows[last]["wall_s"]) - float(rows[first]["wall_s"])
    worked = sum(
        float(row.get(f"perf/{part}_s", 0.0))
        for row in rows[first + 1 : last + 1]
        for part in ("experience", "train", "publish")
    )
    idle = [free for written, free in polled if first < written <= last]
    return LoopFigures(
        step_s=seconds / (last - first),
        trainer_idle=1 - worked / seconds,
        servers_idle=sum(idle) / len(idle),
    )


def simulated_like(measured: Measured, settings: LoopSettings) -> LoopFigures:
    """The simulation of a run like the measured ones. settings: of its configuration."""
    assumed = Assumptions.model_validate(measured["assumptions"])
    answers = [Answers(prompt, tuple(lengths)) for prompt, lengths in measured["answers"]]
    source = RecordedAnswers(recorded=answers, limit=settings.limit)
    found = [figures_of(simulate(replace(settings, seed=seed), assumed, source)) for seed in range(DRAWS)]
    return LoopFigures(
        step_s=statistics.fmean(figures["step_s"]["mean"] for figures in found),
        trainer_idle=statistics.fmean(figures["trainer_idle"] for figures in found),
        servers_idle=statistics.fmean(figures["servers_idle"] for figures in found),
    )

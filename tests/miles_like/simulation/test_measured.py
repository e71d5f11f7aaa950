"""The simulated loop against runs that were measured: docs/plan/simulation.json, by benchmarks/simulation.py.

Calibrated on the synchronous run alone, the simulation finds the step times and idle shares of the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles_like.config.load import load_config
from miles_like.run.simulation_inputs import loop_settings
from miles_like.simulation.inputs.assumptions import Assumptions
from miles_like.simulation.measured import LoopFigures, Measured, measured_figures, simulated_like
from tests.support.chosen import checked
from tests.support.refusals import refuses

ROOT = Path(__file__).parents[3]
RECORD: Measured = json.loads((ROOT / "docs" / "plan" / "simulation.json").read_text(encoding="utf-8"))
STEP, SHARE, LEAST = 0.15, 0.15, 0.05  # of the step's time, of an idle share; of a share that is almost 0


def _simulated(record: Measured, k: str) -> LoopFigures:
    settings = [*record["settings"], f"buffer.max_staleness={k}", f"train.steps={record['steps']}"]
    config = load_config(ROOT / record["config"], settings)
    return simulated_like(record, loop_settings(config, Assumptions.model_validate(record["assumptions"])))


def test_each_bound_was_measured() -> None:
    assert {"0", "1", "2", "4"} <= set(RECORD["runs"])


@pytest.mark.parametrize("k", checked(RECORD["runs"], ("0", "4")))
def test_step_time_and_idle_shares_are_those_of_the_run(k: str) -> None:
    measured, simulated = RECORD["runs"][k], _simulated(RECORD, k)
    assert simulated["step_s"] == pytest.approx(measured["step_s"], rel=STEP)
    assert simulated["trainer_idle"] == pytest.approx(measured["trainer_idle"], rel=SHARE, abs=LEAST)
    assert simulated["servers_idle"] == pytest.approx(measured["servers_idle"], rel=SHARE, abs=LEAST)


def test_a_wrong_calibration_is_seen() -> None:
    """A quarter of the engine's time: another step time, where a step waits for samples."""
    engine = {key: value / 4 for key, value in RECORD["assumptions"]["engine"].items() if key != "cores"}
    assumptions = RECORD["assumptions"] | {"engine": RECORD["assumptions"]["engine"] | engine}
    wrong: Measured = {**RECORD, "assumptions": assumptions}
    assert _simulated(wrong, "0")["step_s"] < (1 - STEP) * RECORD["runs"]["0"]["step_s"]


def _row(wall_s: float, **perf: float) -> dict[str, Any]:
    return {"wall_s": wall_s} | {f"perf/{key}_s": value for key, value in perf.items()}


def test_figures_are_of_the_counted_steps() -> None:
    """Row 0 is before training; the first three steps and the last one are not counted."""
    rows = [_row(0.0), _row(9.0, train=9.0), _row(15.0, train=5.0), _row(19.0, train=9.0)]
    rows += [_row(23.0, train=2.0, publish=1.0), _row(29.0, train=3.0, experience=1.0), _row(99.0, train=1.0)]
    polled = [(3, True), (4, True), (4, False), (5, False), (5, False), (6, True)]
    assert measured_figures(rows, polled, max_staleness=1) == {
        "step_s": 5.0,
        "trainer_idle": pytest.approx(0.3),
        "servers_idle": 0.25,
    }


def test_too_short_a_run_is_refused() -> None:
    with refuses(ValueError, "metrics.jsonl", 5, 6):
        measured_figures([_row(float(i)) for i in range(5)], [], max_staleness=1)

"""The simulation against recorded runs: calibrated on the synchronous run alone, it finds the asynchronous ones.

benchmarks/simulation.py made the records (docs/plan/simulation.json). Not covered: other machines and other models.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from miles_like.commands.simulate import loop_settings, read_assumptions
from miles_like.config.load import load_config
from miles_like.simulation.figures import SimulationFigures, figures_of
from miles_like.simulation.inputs.lengths import RecordedAnswers
from miles_like.simulation.measured import MeasuredRun, MeasuredSeries, errors, read_series
from miles_like.simulation.simulate import simulate

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "docs" / "plan" / "simulation.json"
SERIES = read_series(RECORD)
CASES = [(series, run) for series in SERIES for run in series.runs]
MOST, POINTS = 0.15, 0.05  # relative; shares of idle time that differ by less are equal


def named(value: object) -> str:
    return value.name if isinstance(value, MeasuredSeries) else f"k={getattr(value, 'max_staleness', '')}"


def simulated(series: MeasuredSeries, run: MeasuredRun, **changed: object) -> SimulationFigures:
    config = load_config(
        ROOT / "configs" / "tiny.toml", [*series.settings, f"buffer.max_staleness={run.max_staleness}"]
    )
    tree = series.assumptions(servers=config.rollout.servers, shards=config.parallel.dp) | changed
    assumed = read_assumptions(tree)
    answers = RecordedAnswers(recorded=series.answers, limit=config.rollout.longest_answer)
    return figures_of(simulate(loop_settings(config, assumed), assumed, answers), run.first)


@pytest.mark.parametrize(("series", "run"), CASES, ids=named)
def test_a_simulated_run_takes_the_time_of_the_measured_one(series: MeasuredSeries, run: MeasuredRun) -> None:
    found = errors(run, simulated(series, run))
    assert abs(found["step_s"]) < MOST
    for key, seen in (("trainer_idle", run.trainer_idle), ("servers_idle", run.servers_idle)):
        assert abs(found[key]) < max(MOST * seen, POINTS), key


@pytest.mark.parametrize("series", SERIES, ids=named)
def test_without_shared_processors_the_asynchronous_runs_would_be_missed(series: MeasuredSeries) -> None:
    """So the agreement is the model's, not the tolerance's."""
    missed = [errors(r, simulated(series, r, cores=None))["step_s"] for r in series.runs if r.max_staleness]
    assert min(missed) < -MOST


def test_the_record_says_where_it_is_from() -> None:
    assert {series.name for series in SERIES} == {"tiny", "tails"}
    for series in SERIES:
        assert re.match(r"Commit [0-9a-f]{7}, 20\d\d-\d\d-\d\d, .+ 2 cores", series.made), series.made
        assert [run.max_staleness for run in series.runs] == [0, 1, 2, 4]
        assert all(run.steps - run.first >= 15 for run in series.runs)
        assert MeasuredSeries.from_json(json.loads(json.dumps(series.to_json()))) == series

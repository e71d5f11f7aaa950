"""What is read of a run is what the run wrote, and a simulated run is found again by its calibration.

Not covered: whether a real run's times have this form (tests/miles_like/simulation/test_measured.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.report.metrics import write_rollouts
from miles_like.simulation.calibration import (
    LAST,
    WARM,
    MeasuredStep,
    calibrated,
    is_synchronous,
    nonnegative_fit,
    read_run,
)
from miles_like.simulation.inputs.assumptions import Assumptions
from miles_like.simulation.inputs.lengths import Answers
from tests.support.made_samples import group, sample
from tests.support.refusals import refuses

VALUES = st.lists(st.floats(0.1, 100), min_size=3, max_size=12)


@settings(max_examples=100, deadline=None)
@given(a=VALUES, x=st.floats(-3, 3), z=st.floats(-3, 3), seed=st.integers(0, 10**6))
def test_a_fit_meets_the_conditions_of_nonnegative_least_squares(a: list[float], x: float, z: float, seed: int) -> None:
    """Karush, Kuhn, Tucker: no coefficient is below 0, the error's gradient is 0 along those above it, and does not
    fall along those at it."""
    random = np.random.default_rng(seed)
    first, second = np.array(a), random.uniform(0.1, 100, len(a))
    y = x * first + z * second + random.normal(0, 1, len(a))
    found = nonnegative_fit(first.tolist(), second.tolist(), y.tolist())
    residual = found[0] * first + found[1] * second - y
    for value, column in zip(found, (first, second), strict=True):
        gradient = float(column @ residual) / float(column @ column)
        assert value >= 0
        assert gradient == pytest.approx(0, abs=1e-6) if value > 0 else gradient >= -1e-6


def made_run(path: Path, *, steps: int, buffer: str = "", **row: Any) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.toml").write_text(buffer)
    rows = [{"step": 0, "eval/heldout/avg@1": 0.5}]
    for step in range(1, steps + 1):
        groups = [
            group([sample(f"p{g}", i, prompt_len=2 + g, response_len=1 + step + i) for i in range(3)]) for g in (0, 1)
        ]
        groups.append(groups[0])  # a prompt that is sampled twice in a step
        write_rollouts(path / "rollouts" / f"step_{step}.jsonl", groups)
        seconds = {
            "rollout": 4.0 + step,
            "experience": 0.25,
            "train": 2.0,
            "publish": 0.5,
            "checks": 0.0,
            "pause": 0.25,
        }
        times = {f"perf/{key}_s": value for key, value in seconds.items()}
        rows.append({"step": step, "wall_s": 10.0 * step + 0.5 * step**2, "perf/step_s": 9.0, **times, **row})
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_a_run_is_read_without_its_first_and_last_steps(tmp_path: Path) -> None:
    made_run(tmp_path, steps=7)
    steps = read_run(tmp_path)
    assert [s.rollout_s for s in steps] == [4.0 + n for n in range(WARM + 1, 7 - LAST + 1)]
    first, longest = steps[0], 1 + (WARM + 1) + 2
    lengths = tuple(range(longest - 2, longest + 1))
    assert first.groups == (Answers(2, lengths), Answers(3, lengths), Answers(2, lengths))
    assert first.longest == longest and first.tokens == 3 * sum(lengths) and first.prompt_tokens == 7
    assert sorted(first.inputs()) == sorted(p + n - 1 for p in (2, 3, 2) for n in lengths)
    assert first.between_s == pytest.approx(10 + 0.5 * ((WARM + 1) ** 2 - WARM**2))
    assert is_synchronous(tmp_path)


def test_what_cannot_be_calibrated_on_is_refused(tmp_path: Path) -> None:
    made_run(tmp_path, steps=WARM + LAST)
    with refuses(ValueError, WARM + LAST, WARM + LAST + 1):
        read_run(tmp_path)
    with refuses(ValueError, "metrics.jsonl", "--from"):
        read_run(tmp_path / "none")
    with refuses(ValueError, "config.toml"):
        is_synchronous(tmp_path / "none")
    made_run(tmp_path, steps=8, buffer="[buffer]\nmax_staleness = 1\n")
    assert not is_synchronous(tmp_path)
    (tmp_path / "rollouts" / "step_5.jsonl").unlink()
    with refuses(ValueError, "step_5.jsonl", "--from"):
        read_run(tmp_path)


def test_known_times_are_found_again() -> None:
    """Steps made of known seconds, on two servers and two shards."""
    random = np.random.default_rng(0)
    steps = []
    for _ in range(20):
        groups = tuple(Answers(8, tuple(random.integers(1, 300, 4).tolist())) for _ in range(6))
        fed = sum(sum(g.lengths) + 8 for g in groups) / 2
        longest = max(max(g.lengths) for g in groups)
        inputs = sorted((8 + n - 1 for g in groups for n in g.lengths), reverse=True)
        shards = [0, 0]
        for n in inputs:
            shards[shards.index(min(shards))] += n
        parts = {"rollout_s": 0.02 * longest + 3e-4 * fed, "train_s": 0.7 + 2e-4 * max(shards), "publish_s": 0.3}
        parts |= {"experience_s": 0.1, "checks_s": 0.05}
        steps.append(MeasuredStep(pause_s=0.2, between_s=sum(parts.values()) + 0.04, groups=groups, **parts))
    found = Assumptions.model_validate(calibrated(steps, servers=2, shards=2, one_pass=True))
    assert found.engine.step_s == pytest.approx(0.02) and found.engine.token_s == pytest.approx(3e-4)
    assert found.engine.prefill_s == found.engine.token_s
    assert found.train.fixed_s == pytest.approx(0.7) and found.train.token_s == pytest.approx(2e-4)
    assert (found.publish.seconds, found.publish.pause_s) == (0.3, 0.2)
    assert found.other_s == pytest.approx(0.04) and found.experience_s == 0.1

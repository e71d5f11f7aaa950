"""ReMax in a run: sample 0 of each prompt is the model's greedy answer under the weights that sample the others, it is
scored, and no weight learns from it except as a baseline.

The real loop, server and Megatron rank on plain processes (tests/support/local_run.py). Not covered: the advantages
(test_verl_objectives), a stop with greedy answers in flight (test_stopped_runs).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import tail
from tests.support.local_run import Runs

REMAX = ("algorithm.name=remax", "train.samples_per_group=3", "checkpoint.every=0", "eval.every=0")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("greedy")) as started:
        yield started


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_first_answer_is_greedy_and_only_a_baseline(runs: Runs, tmp_path: Path) -> None:
    found = []
    for temperature in (1.0, 0.05):
        where = tmp_path / str(temperature)
        settings = [*REMAX, f"rollout.temperature={temperature}", "train.steps=1"]
        assert runs.run(where, settings) == 0, tail(where / "driver.log")
        found.append({(s["prompt_id"], s["index"]): s for s in lines(where / "rollouts" / "step_1.jsonl")})
    one, other = found
    assert one.keys() == other.keys() and len(one) == 4 * 3
    same = {key for key, s in one.items() if s["token_ids"] == other[key]["token_ids"]}
    assert {key for key in one if key[1] == 0} <= same and len(same) < 8, "a temperature changes sampled answers only"
    rewards = {greedy: [s["reward"] for (_, i), s in one.items() if (i == 0) == greedy] for greedy in (True, False)}
    row = lines(tmp_path / "1.0" / "metrics.jsonl")[1]
    assert row["rollout/reward/greedy"] == pytest.approx(statistics.fmean(rewards[True]))
    assert row["rollout/reward/mean"] == pytest.approx(statistics.fmean(rewards[False]))
    sampled = sum(s["tokens"] for (_, i), s in one.items() if i)
    assert row["tokens_total"] == sampled < row["rollout/tokens"]
    assert row["ledger/trained"] == 12 and row["train/grad_norm"] > 0

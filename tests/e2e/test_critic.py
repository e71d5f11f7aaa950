"""A run with every part that speaks before advantages: a critic, a reference that moves, a filter, penalties.

It goes on from a checkpoint as if it had never stopped. Not covered: that a critic helps
(docs/studies/algorithms.md), a process that is killed (test_faults.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ONE_RANK, ROOT, SMALL, Run
from tests.e2e.test_pipeline import metrics
from tests.e2e.test_verify import REWARD

SETTINGS = (
    *("algorithm.name=ppo", "algorithm.kl_coefficient=0.05", "algorithm.reference_every=1", "critic.lr=1e-3"),
    *("algorithm.filter=nonzero_std", "algorithm.overlong_penalty=0.5", "algorithm.entropy_coefficient=0.01"),
    *("train.steps=2", "train.steps_per_rollout=2", "checkpoint.every=1", "alignment.deterministic=true"),
    *("eval.max_prompts=2", f"reward.name={REWARD}"),
)
OF_THE_CLOCK = ("perf/", "wall_s", "sync/seconds")


@pytest.fixture(scope="module")
def critic(run: Run, home: Path) -> Path:
    sets = (x for one in SETTINGS for x in ("--set", one))
    done = run("--run-dir", str(home / "critic"), *SMALL, *ONE_RANK, *sets, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 trainer rank, 1 critic rank" in done.stdout
    return home / "critic"


@pytest.mark.long(beside="tests/miles_like/experience/test_experience.py")
def test_each_part_has_its_say(critic: Path) -> None:
    first, second = metrics(critic)[1:]
    for row in (first, second):
        assert row["critic/loss"] > 0 and row["critic/grad_norm"] > 0 and row["critic/lr"] > row["train/lr"] > 0
        assert row["rollout/zero_std_group_frac"] == 0 <= row["rollout/filtered_frac"]
        assert row["perf/experience_s"] > 0
    assert first["critic/value/mean"] != second["critic/value/mean"]
    assert first["train/kl_ref"] >= 0 < second["train/kl_ref"]
    kept = [json.loads(line) for line in (critic / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    assert any(r["reward_parts"].get("overlong", 0) < 0 for r in kept)


@pytest.mark.long(beside="tests/laws/test_kills.py")
def test_a_run_that_goes_on_is_the_one_that_never_stopped(run: Run, critic: Path, home: Path) -> None:
    again = home / "critic_again"
    shutil.copytree(critic, again)
    shutil.rmtree(again / "checkpoints" / "step_2")
    (again / "checkpoints" / "latest").write_text("step_1\n")
    (again / ".complete.json").unlink()  # or nothing would be left to do
    sets = (x for one in SETTINGS for x in ("--set", one))
    done = run("--run-dir", str(again), *SMALL, *ONE_RANK, *sets, "--resume", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("complete, skipped") == 3  # fetch, dequantize and convert
    assert "(each node verifies its copy)" in done.stdout  # of a Ray that is joined, a node's disk may be new

    def bits(row: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in row.items() if not k.startswith(OF_THE_CLOCK)}

    assert bits(metrics(again)[-1]) == bits(metrics(critic)[-1])
    kept = [(folder / "rollouts" / "step_2.jsonl").read_text() for folder in (critic, again)]
    assert kept[0] == kept[1]

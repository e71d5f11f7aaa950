"""Critic, reference and a teacher's server on pools of nodes: Ray has each process where its pool says, and what a role
computes there is what it computes beside the trainer, bit for bit.

Two runs on a cluster of two nodes: one without pools, one with the three roles on node 1. Not covered: GPUs; several
machines (tests/cluster has nodes with separate addresses and disks).
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.conftest import LIMIT_S, ONE_RANK, ROOT, SMALL, environment
from tests.e2e.test_pipeline import metrics
from tests.support.command import Commands
from tests.support.local_run import untimed
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

SCRIPT = ROOT / "tests" / "support" / "placed_run.py"
TOKENIZER = ROOT / "configs" / "tiny"
pytestmark = pytest.mark.long(beside="tests/miles_like/cluster/test_workers.py")  # ranks of the reference; placement
ROLES = ("critic", "reference", "teachers")
SETTINGS = (
    *("algorithm.name=ppo", "algorithm.kl_coefficient=0.05", "critic.lr=1e-3", "distillation.mode=added"),
    *("train.steps=2", "eval.max_prompts=2", "alignment.deterministic=true", "cluster.nodes=2"),
)
OF_ROLE = {"critic": "critic/", "reference": "train/kl_ref", "teachers": "distill/"}  # prefixes of metrics


class Done(NamedTuple):
    """A run that has ended."""

    where: Path
    nodes: dict[str, list[int]]  # of the processes of each role, by their index

    def of(self, role: str) -> list[dict[str, float]]:
        """What the role reports, in each step."""
        return [{k: v for k, v in row.items() if k.startswith(OF_ROLE[role])} for row in metrics(self.where)[1:]]


@pytest.fixture(scope="module")
def runs(commands: Commands, two_nodes: str, home: Path) -> dict[str, Done]:
    teacher = write_checkpoint(home / "teacher", tiny(), random_tensors(tiny()))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(TOKENIZER / name, teacher / name)
    sets = (*SETTINGS, f"distillation.teachers.other={{path='{teacher}'}}")

    def run(name: str, *more: str) -> Done:
        where, placed = home / name, home / f"{name}.placed"
        given = [word for one in (*sets, *more) for word in ("--set", one)]
        arguments = ["--run-dir", str(where), *SMALL, *ONE_RANK, *given, "--ray-address", two_nodes]
        done = commands.run(str(SCRIPT), arguments, environment(PLACED=str(placed)), LIMIT_S)
        assert done.returncode == 0, done.stderr[-3000:]
        nodes: dict[str, dict[int, int]] = defaultdict(dict)
        for line in placed.read_text().splitlines():
            found: dict[str, Any] = json.loads(line)
            nodes[found["role"]][found["index"]] = found["node"]
        return Done(where, {role: [of[i] for i in sorted(of)] for role, of in nodes.items()})

    return {"beside": run("beside"), "pools": run("pools", *(f"cluster.pools.{role}.nodes=1" for role in ROLES))}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_on_its_pool_and_computes_there_what_it_computes_elsewhere(runs: dict[str, Done], role: str) -> None:
    beside, pools = runs["beside"], runs["pools"]
    assert pools.nodes[role] == [1]
    assert beside.nodes.get(role) == (None if role == "reference" else [0])  # the trainer swaps its weights in
    assert pools.of(role) == beside.of(role)
    assert all(of and any(of.values()) for of in pools.of(role)[1:]), "the role computes nothing"


def test_all_else_stays_where_it_was_and_the_runs_are_the_same(runs: dict[str, Done]) -> None:
    beside, pools = (runs[name] for name in ("beside", "pools"))
    for run in (beside, pools):
        assert {role: nodes for role, nodes in run.nodes.items() if role not in ROLES} == {
            "trainer": [0],
            "rollout": [0],
        }
    for step in (1, 2):
        kept = [run.where / "rollouts" / f"step_{step}.jsonl" for run in (beside, pools)]
        assert kept[0].read_bytes() == kept[1].read_bytes()
    assert untimed(pools.where / "metrics.jsonl") == untimed(beside.where / "metrics.jsonl")

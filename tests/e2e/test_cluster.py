"""The cluster's path on one machine: joining a running Ray cluster of two nodes.

Not covered: several machines, GPUs, SGLang as the rollout (tests/sglang_cpu).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, SMALL, Run, environment
from tests.support.refusals import check_refusal
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

ONE_STEP = (*SMALL, "--set", "train.steps=1")


@pytest.mark.long(beside="tests/cluster/test_spread_run.py")
def test_the_command_joins_a_running_cluster_and_uses_its_nodes(shell: Run, two_nodes: str, home: Path) -> None:
    """One trainer rank on each node, staging once on each; the same command as on a laptop but for the address."""
    done = shell("--run-dir", str(home / "two"), *ONE_STEP, "--ray-address", two_nodes, "--set", "cluster.nodes=2")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(x) for x in (home / "two" / "metrics.jsonl").read_text().splitlines()]
    assert rows[1]["routing/replay_coverage"] == 1.0
    staged = max(home.glob("cache/stage-*/.complete.json"), key=lambda p: p.stat().st_mtime)
    assert json.loads(staged.read_text())["files"]


@pytest.mark.long(beside="tests/cluster/test_spread_run.py")
def test_a_conversion_shared_by_two_nodes_is_one_machine_s(two_nodes: str, tmp_path: Path) -> None:
    """There and back, checksum for checksum; nodes share a file system."""
    source = write_checkpoint(tmp_path / "hf", tiny(), random_tensors(tiny()))
    there, back = tmp_path / "megatron", tmp_path / "back"
    found = []
    for how in ([], ["--ray-address", two_nodes]):
        for verb, a, b in (("to-megatron", source, there), ("to-hf", there, back)):
            done = subprocess.run(
                [sys.executable, "-m", "miles_like.cli", "convert", verb, str(a), str(b), *how],
                capture_output=True,
                text=True,
                timeout=120,
                cwd=ROOT,
                env=environment(),
            )
            assert done.returncode == 0, done.stderr[-3000:]
        found.append([json.loads((out / "manifest.json").read_text())["tensors"] for out in (there, back)])
        shutil.rmtree(there)
        shutil.rmtree(back)
    assert found[0] == found[1]


@pytest.mark.long(beside="tests/miles_like/cluster/test_run_nodes.py")
def test_a_placement_larger_than_the_cluster_is_refused(shell: Run, two_nodes: str, home: Path) -> None:
    done = shell("--run-dir", str(home / "three"), *ONE_STEP, "--ray-address", two_nodes, "--set", "cluster.nodes=3",
               "--set", "cluster.timeout_s=5", "--set", "parallel.dp=3", "--set", "parallel.ep=1")  # fmt: skip
    assert done.returncode == 2
    check_refusal(done.stderr, 2, "cluster.nodes")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.long(beside="tests/miles_like/preflight/test_dry_run.py")
def test_no_cluster_at_the_address_is_one_sentence(alone: Run, tmp_path: Path) -> None:
    done = alone("--run-dir", str(tmp_path / "none"), *ONE_STEP, "--ray-address", "127.0.0.1:1")
    assert done.returncode == 2
    check_refusal(done.stderr, "127.0.0.1:1")

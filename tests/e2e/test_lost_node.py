"""A node of a run is lost: the trainer goes on with fewer data-parallel rows on the node that is left, with the server
there.

Two nodes of Ray on one machine, of which one ends at once with all its processes. Not covered: nodes with separate
addresses and disks; another node in the place of the lost one (tests/miles_like/run/rebuild/test_lost_layout.py has the
arithmetic).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from miles_like.checkpoint.ledger_audit import audit
from tests.e2e.looked_at import descendants
from tests.e2e.test_faults import in_mid_run, started

RUN = (
    *("--set", "cluster.nodes=2"),
    *("--set", "parallel.dp=2"),
    *("--set", "parallel.ep=2"),
    *("--set", "rollout.servers=2"),
    *("--set", "rollout.workers=0"),
    *("--set", "train.steps=8"),
    *("--set", "checkpoint.every=1"),
    *("--set", "alignment.deterministic=true"),
    *("--set", "rollout.max_new_tokens=16"),
    *("--set", "rollout.request_timeout_s=60.0"),
    *("--set", "cluster.rebuilds=3"),
)


@pytest.mark.long(beside="tests/laws/test_rebuilt_ranks.py")
def test_a_run_that_loses_a_node_goes_on_with_fewer_rows(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    second = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    run_dir = home / "lost-node"
    try:
        with started(run_dir, *RUN, "--ray-address", cluster.address) as driver:
            in_mid_run(driver, run_dir, steps=3)
            before = len((run_dir / "metrics.jsonl").read_text().splitlines())
            cluster.remove_node(second, allow_graceful=False)
            out, errors = driver.communicate(timeout=400)
            print("\n".join(line for line in out.splitlines() if "lost" in line or "rebuilt" in line))
            assert driver.returncode == 0, errors[-3000:]
            assert not descendants(driver)
    finally:
        cluster.shutdown()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert before < len(rows) == 9 and [row["step"] for row in rows] == list(range(9))
    assert [row["perf/rebuilds"] for row in rows if "perf/rebuilds" in row] == [1.0]
    assert "node 1 is lost: the trainer goes on with parallel.dp = 1 (was 2)" in " ".join(out.split())
    assert audit(run_dir / "ledger.jsonl").wrong is None

"""A node of a run falls silent, with no end of a connection, and the run goes on without it: with a rank and a server
it is cut off and comes back later; with a server alone it crashes.

What survives in either case is one driver process, and the ledger is closed. Ray declares a silent node dead after some
twenty seconds. Not covered: GPUs, another node in the place of the lost one; ends of connections that the others see
(tests/e2e/test_lost_node.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_like.checkpoint.ledger_audit import audit
from miles_like.fleet.control import status
from tests.support.local_run import QUICK, TINY, Runs
from tests.support.namespaces import Cluster, nodes

pytestmark = pytest.mark.long(beside="tests/laws/test_rebuilt_ranks.py")

STEPS = 8
LIMIT_S = 1200.0  # of each wait, which takes a minute on an idle machine
SETTINGS = (
    *QUICK,
    *("cluster.nodes=2", "rollout.servers=2", "rollout.restarts=3", "cluster.rebuilds=3", f"train.steps={STEPS}"),
    *("rollout.health_every_s=2.0", "rollout.health_timeout_s=10.0", "model.make=false"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with Runs(tmp_path_factory.mktemp("cut_off")) as runs:
        yield (runs.home / "hf").resolve()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with nodes(2, hosts=["good", "hostile"], work=tmp_path) as made:
        made.start_ray()
        yield made


class Driver:
    """A run, whose command is on the first node."""

    def __init__(self, cluster: Cluster, model: Path, work: Path, *settings: str) -> None:
        self.run_dir, self._printed = work / "run", work / "printed"
        own = (f"model.path={model}", f"cluster.stage_dir={cluster.disk}/local", f"cache_dir={work}/cache")
        words = [word for setting in (*SETTINGS, *settings, *own) for word in ("--set", setting)]
        command = [sys.executable, "-m", "miles_like.cli", "train", str(TINY), "--run-dir", str(self.run_dir)]
        with self._printed.open("w") as out:
            self.process: subprocess.Popen[Any] = cluster[0].popen(
                [*command, "--ray-address", cluster.ray_address, *words], stdout=out, stderr=out, env={"COLUMNS": "400"}
            )

    @property
    def printed(self) -> str:
        return " ".join(self._printed.read_text().split())

    @property
    def rows(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, true: Callable[[], object], what: str) -> float:
        """Seconds until then."""
        began = time.monotonic()
        while not true():
            assert self.process.poll() is None and time.monotonic() < began + LIMIT_S, f"{what}: {self.printed[-4000:]}"
            time.sleep(0.1)
        return time.monotonic() - began

    def ends(self) -> None:
        assert self.process.wait(LIMIT_S) == 0, self.printed[-4000:]
        assert [row["step"] for row in self.rows] == list(range(STEPS + 1))
        assert audit(self.run_dir / "ledger.jsonl").wrong is None
        assert len((self.run_dir / "starts.jsonl").read_text().splitlines()) == 1, "one driver"


def test_a_node_with_a_rank_and_a_server_that_is_cut_off_and_comes_back(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    """Its rank and its server have ended then: Ray ends what it has declared dead."""
    run = Driver(cluster, model, tmp_path, "parallel.dp=2", "parallel.ep=2")
    run.until(lambda: len(run.rows) > 2, "the third step")
    cluster[1].unplug()
    seconds = run.until(lambda: "parallel.dp = 1 (was 2)" in run.printed, "another layout")
    cluster[1].plug_in()
    run.ends()
    assert [row["perf/rebuilds"] for row in run.rows if "perf/rebuilds" in row] == [1.0]
    assert "its node is lost" in run.printed
    (server,) = [row for row in status(run.run_dir)["servers"] if row["state"] == "retired"]
    assert server["server"] == 1
    left = cluster[1].run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"], check=False).stdout
    assert "ray::_Rank" not in left and "rollout.embedded.server" not in left
    print(f"another layout after {seconds:.1f} s")


def test_a_node_with_a_server_alone_that_crashes(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """No rank is lost: the other server samples everything."""
    run = Driver(cluster, model, tmp_path, "parallel.dp=1", "parallel.ep=1")
    run.until(lambda: len(run.rows) > 2, "the third step")
    cluster[1].crash()
    run.ends()
    assert not [row for row in run.rows if "perf/rebuilds" in row]
    states = {row["server"]: (row["state"], row["why"]) for row in status(run.run_dir)["servers"]}
    assert states[0][0] == "healthy" and states[1][0] in ("retired", "dead", "restarting"), states
    print("\n".join(line for line in run._printed.read_text().splitlines() if "Rollout server" in line))

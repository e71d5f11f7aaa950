"""Nodes that are missing, late or busy: a command ends in a sentence within `cluster.timeout_s`, or waits with a line.

Ray runs with nodes on this machine that have pretended GPUs. A command that gets its nodes ends at what is checked
next, because they lack TransformerEngine. Not covered: several machines, GPUs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
import ray
from rich.console import Console

from miles_like.config.load import load_config
from miles_like.nodes.members import free_gpus, living_nodes
from miles_like.nodes.waits import on_node
from miles_like.run.setup.run_cluster import RunCluster
from tests.support.command import Commands
from tests.support.placed import RAYLET, all_are_free
from tests.support.pretended import QUIET, PretendedCluster, pretended_cluster
from tests.support.refusals import check_refusal

TINY = Path(__file__).parents[4] / "configs" / "tiny.toml"
LIMIT_S = 120.0  # of a command, far above every cluster.timeout_s here that it may exhaust
LATE, FIRST, SECOND = "127.0.0.3", "127.0.0.9", "127.0.0.12"
RACKS = {9: "r2", 12: "r10", 3: "r10"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[PretendedCluster]:
    """Two nodes of 8 GPUs and a head without."""
    with pretended_cluster([12, 9], RAYLET, racks=RACKS) as made:
        yield made


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("commands")) as forks:
        yield forks


Train = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def train(commands: Commands, cluster: PretendedCluster, tmp_path: Path) -> Train:
    """`miles-like train` of a run on so many nodes of 8 GPUs, with more settings of its cluster."""

    def run(nodes: int, **settings: object) -> subprocess.CompletedProcess[str]:
        given = {"nodes": nodes, "gpus_per_node": 8, **settings}
        sets = [f"--set=cluster.{key}={value}" for key, value in given.items()]
        address = ("--run-dir", str(tmp_path / "run"), "--ray-address", cluster.address)
        variables = os.environ | QUIET | {"COLUMNS": "200"}
        return commands.run("", ("train", str(TINY), *address, *sets, "--set=kernels.spec=te"), variables, LIMIT_S)

    return run


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The only line of the command's errors."""
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return line.removeprefix("error: ")


def check_placed(done: subprocess.CompletedProcess[str]) -> None:
    """The command had its nodes, and ended at what they lack."""
    assert "transformer_engine" in refused(done) and "cluster.nodes" not in done.stderr, done.stderr


def wait_for(path: Path, text: str) -> None:
    until = time.monotonic() + LIMIT_S
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < until, f"{path} does not say {text!r}"
        time.sleep(0.1)


@pytest.fixture
def other_job(cluster: PretendedCluster) -> Iterator[None]:
    """A job that is no run has one GPU of the first node."""

    @ray.remote(num_gpus=1, num_cpus=0)
    class Other:
        def there(self) -> bool:
            return True

    taken = next(n for n in living_nodes() if n.address == FIRST)
    other = Other.options(scheduling_strategy=on_node(taken.id)).remote()  # type: ignore[attr-defined]
    ray.get(other.there.remote(), timeout=LIMIT_S)
    yield
    ray.kill(other)
    assert all_are_free()


def test_a_missing_node_is_named_within_the_limit(train: Train, tmp_path: Path) -> None:
    done = train(3, timeout_s=2)
    facts = (3, 8, FIRST, SECOND, "cluster.nodes", "after 2 s (cluster.timeout_s)")
    check_refusal(refused(done), *facts, unrecorded="it names this machine")
    assert done.stdout.count("Waiting for nodes: 2 of 3 nodes with 8 GPUs each") == 1
    assert not (tmp_path / "run").exists() and all_are_free()


def test_a_gpu_that_another_job_has_is_named(train: Train, other_job: None) -> None:
    """With one GPU gone nothing of the run is reserved."""
    message = refused(train(2, timeout_s=3))
    facts = (f"{FIRST} has 7 of 8 GPUs free", "another Ray job", "cluster.when_busy")
    check_refusal(message, *facts, unrecorded="it names this machine")
    assert free_gpus()[next(n.id for n in living_nodes() if n.address == SECOND)] == 8


def test_work_without_gpus_is_done_on_nodes_that_others_use(
    cluster: PretendedCluster, other_job: None, tmp_path: Path
) -> None:
    """And takes none of their GPUs; once a run has reserved nodes, such work is done on these."""
    config = load_config(TINY, ["cluster.gpus_per_node=8", f"cluster.timeout_s={LIMIT_S}"])
    run = RunCluster(config, tmp_path / "run", Console(file=StringIO()), cluster.address)
    assert [n.address for n in run.hosts()] == [FIRST]
    assert sorted(int(n) for n in free_gpus().values() if n) == [7, 8]
    try:
        assert [n.address for n in run.nodes().nodes] == [n.address for n in run.hosts()] == [SECOND]
        assert len(run.nodes().facts[0].devices) == 8
    finally:
        run.release()


RUNS = """
import sys, time
from miles_like.nodes.reservation import reserve
from miles_like.nodes.session import start_ray
start_ray(sys.argv[1])
held = reserve(2, 8, run="/runs/first", when_busy="refuse", timeout_s=60, say=print)
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_run_is_refused_or_queued_until_the_first_is_killed(
    train: Train, commands: Commands, cluster: PretendedCluster
) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", RUNS, cluster.address], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        message = refused(train(1, timeout_s=2))
        facts = ("/runs/first", first.pid, FIRST, "cluster.when_busy")
        check_refusal(message, *facts, unrecorded="it names a host")
        done: list[subprocess.CompletedProcess[str]] = []
        second = threading.Thread(target=lambda: done.append(train(1, timeout_s=LIMIT_S, when_busy="queue")))
        output = commands.where / f"command_{commands.number + 1}.out"
        second.start()
        wait_for(output, "Queued for")
        first.send_signal(signal.SIGKILL)
        second.join(LIMIT_S)
        check_placed(done[0])
        assert done[0].stdout.count("Queued for") == 1 and "/runs/first" in done[0].stdout
    finally:
        first.kill()
        first.wait(30)
    assert all_are_free()


@pytest.mark.long(beside="tests/miles_like/run/setup/test_run_cluster.py")
def test_a_late_node_is_taken_when_it_comes(
    train: Train, commands: Commands, cluster: PretendedCluster, tmp_path: Path
) -> None:
    """Last, because the cluster has three nodes then. The late one has the smallest address, and its rack the larger
    number, so that it becomes node 1. Two nodes are then taken from this rack, which they fill, and not the first
    two."""
    done: list[subprocess.CompletedProcess[str]] = []
    run = threading.Thread(target=lambda: done.append(train(3, timeout_s=LIMIT_S)))
    output = commands.where / f"command_{commands.number + 1}.out"
    run.start()
    wait_for(output, "Waiting for nodes: 2 of 3 nodes with 8 GPUs each")
    cluster.add([3], racks=RACKS)
    run.join(LIMIT_S)
    check_placed(done[0])
    for nodes, wanted in ((3, [FIRST, LATE, SECOND]), (2, [LATE, SECOND])):
        config = load_config(TINY, ["cluster.gpus_per_node=8", f"cluster.nodes={nodes}"])
        again = RunCluster(config, tmp_path / "run", Console(file=StringIO()), cluster.address)
        assert [n.address for n in again.hosts()] == wanted
        again.release()
        assert [n.address for n in again.nodes().nodes] == wanted
        again.release()
        assert all_are_free()

"""A run's real ranks and servers over two nodes are those of one machine, and each finds its node's network and disk.

The nodes of namespaces have a disk each; one of them has a hostile hosts file, where the host name is 127.0.1.1, and
every node's Ray was started with wrong variables, which its workers inherit. The command is started on a third node,
which alone has the model. Placement of a run with GPUs, which Ray only counts, leaves out the head without any. Not
covered: GPUs, NCCL.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import spread_run
from tests.support.local_run import COLUMNS, QUICK, TINY, Runs, same_run, untimed
from tests.support.namespaces import Cluster, address_of, nodes
from tests.support.node_listing import listed
from tests.support.refusals import check_refusal

DRIVER = 2
RAYLET = {  # of each node's Ray
    "GLOO_SOCKET_IFNAME": "wrong0",
    "NCCL_SOCKET_IFNAME": "wrong0",
    "NCCL_DEBUG": "WRONG",
    "OMP_NUM_THREADS": "77",
    "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(8))),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
}
SETTINGS = (*QUICK, "parallel.dp=2", "parallel.ep=2", "rollout.servers=2", "train.steps=2")


class Ran(NamedTuple):
    """A run over two nodes."""

    run_dir: Path
    seen: Mapping[str, Any]  # process -> what it found
    output: str


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spread")


@pytest.fixture(scope="module")
def runs(work: Path) -> Iterator[Runs]:
    (work / "home").mkdir()
    with Runs(work / "home") as started:
        yield started


@pytest.fixture(scope="module")
def cluster(work: Path, runs: Runs) -> Iterator[Cluster]:
    """Node 0 is a head without GPUs."""
    with nodes(3, hosts=["good", "hostile", "good"], disk_mib=256, work=work) as made:
        for node in made:
            node.run(["sh", "-c", f"printf {node.name} > {made.disk}/owner"])
            node.environment |= RAYLET
        made[DRIVER].run(["cp", "-r", str((runs.home / "hf").resolve()), str(made.disk / "hf")])
        made.start_ray(gpus=[0, 8, 8])
        for node in made:
            for name in RAYLET:
                del node.environment[name]
        yield made


def settings(cluster: Cluster) -> list[str]:
    """Of a run whose model, cache and copies are on the nodes' own disks."""
    disk = cluster.disk
    own = [f"model.path={disk}/hf", f"cache_dir={disk}/cache", f"cluster.stage_dir={disk}/local", "model.make=false"]
    env = f"{spread_run.DISK}='{disk}'"
    env = [f"cluster.env={{{env}, NCCL_DEBUG='INFO', RUN_KEY=''}}", f"rollout.env={{{env}, NCCL_DEBUG='WARN'}}"]
    return [*SETTINGS, "cluster.nodes=2", *own, *env]


def launch(cluster: Cluster, cwd: Path, run_dir: str, given: Sequence[str], *, seen: bool = True) -> tuple[int, str]:
    """(exit status, output) of the command on the driver's node."""
    words = [word for setting in given for word in ("--set", setting)]
    module = "from tests.support.spread_run import command" if seen else "from miles_like.cli import main as command"
    train = ["train", str(TINY), "--run-dir", run_dir, "--ray-address", cluster.ray_address, *words]
    done = cluster[DRIVER].run(
        [sys.executable, "-c", f"{module}; command()", *train],
        check=False,
        cwd=cwd,
        env={"RUN_KEY": "a secret", "COLUMNS": "200"},
        timeout_s=900.0,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def ran(cluster: Cluster, work: Path) -> Ran:
    status, output = launch(cluster, work, "runs/two", settings(cluster))
    assert status == 0, output[-4000:]
    run_dir = work / "runs" / "two"
    return Ran(run_dir, {p.stem: json.loads(p.read_text()) for p in (run_dir / "logs").glob("*.json")}, output)


def test_two_steps_over_two_nodes_are_those_of_one_machine(ran: Ran, runs: Runs, work: Path) -> None:
    """Loss, gradient, samples and rewards, bit for bit; the other run's processes are all this machine's. A rollout
    worker on each node has sampled for ranks on both; in the other run the driver has."""
    assert runs.run(work / "runs" / "one", SETTINGS) == 0
    assert untimed(ran.run_dir / "metrics.jsonl") == untimed(work / "runs" / "one" / "metrics.jsonl")
    rows = [json.loads(line) for line in (ran.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2] and all(row["train/grad_norm"] > 0 for row in rows[1:])
    assert (ran.run_dir / "checkpoints" / "step_2" / "groups" / "1.safetensors").exists()
    assert all("perf/held_bytes" in row for row in rows[1:])


@pytest.mark.long(beside="tests/laws/test_rollout_workers.py")
@pytest.mark.parametrize("case", COLUMNS)
def test_columns_that_workers_on_two_nodes_hold_are_those_of_one_machine(
    cluster: Cluster, runs: Runs, work: Path, case: str
) -> None:
    """Each worker's node has one of the ranks, which get columns from both and give columns to both."""
    given, name = (*SETTINGS, "eval.every=0", *COLUMNS[case]), case.partition(":")[0].partition(",")[0]
    assert runs.run(work / "runs" / f"{name}, alone", given) == 0
    status, output = launch(cluster, work, f"runs/{name}", [*settings(cluster), *given], seen=False)
    assert status == 0, output[-4000:]
    same_run(work / "runs" / name, work / "runs" / f"{name}, alone")


def test_each_process_is_on_its_node_with_that_node_s_disk_and_the_run_s_variables(ran: Ran, cluster: Cluster) -> None:
    assert sorted(ran.seen) == ["rollout_actor0.0", "rollout_actor1.0", "trainer_rank0", "trainer_rank1"]
    for name, seen in ran.seen.items():
        k, trains = int(name.removesuffix(".0")[-1]), "rank" in name
        assert (seen["host"], seen["address"], seen["disk"]) == (f"node{k}", address_of(k), f"node{k}")
        environment = seen["environment"]
        assert environment["GLOO_SOCKET_IFNAME"] == "eth0" and environment["NCCL_SOCKET_IFNAME"] == "=eth0"
        assert environment["OMP_NUM_THREADS"] == "1"
        assert environment["NCCL_DEBUG"] == ("INFO" if trains else "WARN")
        assert environment.get("RUN_KEY") == ("a secret" if trains else None)
        if trains:
            assert (seen["world"], seen["backend"]) == (2, "gloo")
        else:
            assert seen["url_host"] == address_of(k)
    assert "a secret" not in ran.output
    written = [p for p in ran.run_dir.rglob("*") if p.is_file() and p.with_suffix("").name not in ran.seen]
    assert len(written) > 10 and not [p for p in written if b"a secret" in p.read_bytes()]


def test_each_node_has_what_it_loads_and_only_the_driver_s_has_the_cache(ran: Ran, cluster: Cluster) -> None:
    local = [node.call(listed, cluster.disk / "local") for node in cluster]
    for files in local[:2]:
        assert [name for name in files if name.endswith(".safetensors")] and [x for x in files if ".distcp" in x]
    assert not [name for name in local[DRIVER] if name.endswith((".safetensors", ".distcp"))]
    cached = [node.call(listed, cluster.disk / "cache") for node in cluster]
    assert cached[DRIVER] and not cached[0] and not cached[1]


@pytest.mark.long(beside="tests/miles_like/preflight/test_preflight.py")
def test_a_run_directory_on_a_private_disk_is_refused(cluster: Cluster, work: Path) -> None:
    """Before the first stage, naming the nodes that do not see it."""
    disk = cluster.disk
    given = [*settings(cluster), f"cache_dir={disk}/other"]
    status, output = launch(cluster, work, f"{disk}/runs/private", given, seen=False)
    assert status == 2, output
    for k in range(2):
        facts = f"node {k} (node{k})", "trainer ranks write their checkpoints", "--run-dir"
        check_refusal(output, *facts, unrecorded="both sentences are in one")
    left = cluster[DRIVER].run(["ls", "-A", str(disk)]).stdout.split()
    assert not {"runs", "other"} & set(left) and not [name for name in left if name.startswith(".")]


@pytest.mark.long(beside="tests/miles_like/cluster/test_run_nodes.py")
def test_a_run_with_gpus_leaves_out_a_head_without_any(cluster: Cluster, tmp_path: Path) -> None:
    """Nodes are chosen once, in the order of their addresses."""
    got = cluster[0].call(spread_run.placed_on_gpus, cluster.ray_address, str(cluster.disk), tmp_path)
    assert got["nodes"] == got["again"] == [address_of(1), address_of(2)] and got["hosts"] == ["node1", "node2"]
    assert set(got["seen"]) == {"trainer 0", "trainer 1", "rollout 0", "rollout 1"}
    for name, seen in got["seen"].items():
        k, environment = int(name[-1]) + 1, seen["environment"]
        assert seen["address"] == address_of(k)
        assert environment["GLOO_SOCKET_IFNAME"] == "eth0" and environment["NCCL_SOCKET_IFNAME"] == "=eth0"
        assert environment["TRITON_CACHE_DIR"].startswith(str(cluster.disk))
        assert environment["OMP_NUM_THREADS"] != "77"
        assert len(environment["CUDA_VISIBLE_DEVICES"].split(",")) == (1 if "trainer" in name else 2)


@pytest.mark.long(beside="tests/miles_like/run/setup/test_run_teachers.py")
def test_a_teacher_s_server_on_another_node_gets_its_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    disk = cluster.disk
    got = cluster[DRIVER].call(spread_run.teach, cluster.ray_address, disk / "hf", disk, tmp_path / "run")
    assert got["url"].startswith(f"http://{address_of(1)}:")
    copied = cluster[1].call(listed, Path(got["model_path"]))
    source = cluster[DRIVER].call(listed, disk / "hf")
    assert copied == source and str(got["model_path"]).startswith(f"{disk}/local/teacher-")

"""A run's processes are on the nodes and devices of its plan, and what cannot be placed is refused in a sentence.

Ray runs with nodes on this machine that have pretended GPUs: it counts and assigns them, and CUDA is never asked. Not
covered: several machines, GPUs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import ray

from miles_like.cluster.placement import PlacementPlan, Slot, plan_placement
from miles_like.cluster.run_nodes import RunNodes
from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.nodes.members import free_gpus, living_nodes
from miles_like.nodes.reservation import Reservation, reserve
from miles_like.nodes.waits import on_node
from tests.support.pretended import PretendedCluster, Probe, pretended_cluster
from tests.support.refusals import check_refusal, refuses

CONFIGS = Path(__file__).parents[3] / "configs"
FIRST_DEVICE = 8
RAYLET = {  # of each node's Ray, whose workers inherit it
    "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(FIRST_DEVICE, FIRST_DEVICE + 8))),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # hides all GPUs from actors without num_gpus
    "OMP_NUM_THREADS": "77",
    "NCCL_DEBUG": "WRONG",
    "GLOO_SOCKET_IFNAME": "wrong0",
}
WAIT_S = 120.0
LONG = pytest.mark.long(beside="tests/miles_like/cluster/test_run_nodes.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[PretendedCluster]:
    """Two nodes of 8 GPUs, the one with the larger address first, and a head without."""
    with pretended_cluster([12, 9], RAYLET) as made:
        yield made


def reserved(count: int, run: str = "a", *, when_busy: str = "refuse", timeout_s: float = 30.0) -> Reservation:
    said: list[str] = []
    return reserve(count, 8, run=run, when_busy=when_busy, timeout_s=timeout_s, say=said.append)  # type: ignore[arg-type]


def all_are_free(seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        free = free_gpus()
        if all(free.get(n.id, 0) == n.gpus for n in living_nodes()):
            return True
        time.sleep(0.2)
    return False


def shipped(name: str, *more: str) -> tuple[RunConfig, PlacementPlan]:
    config = load_config(CONFIGS / name, list(more))
    return config, plan_placement(config.cluster, config.parallel, config.servers)


def run_nodes(config: RunConfig, held: Reservation) -> RunNodes:
    return RunNodes(nodes=held.nodes, facts=held.facts, cluster=config.cluster, server_env=config.rollout.env)


def check_seen(slots: Sequence[Slot], nodes: RunNodes, seen: Mapping[Slot, Mapping[str, str]]) -> None:
    """Every process has the devices of its slot and no other, both sides of a GPU the same one by its UUID."""
    uuids: dict[tuple[int, int], set[str]] = {}
    for slot, environment in seen.items():
        devices = {d.index: d.uuid for d in nodes.facts[slot.node].devices}
        visible = [devices[int(i)] for i in environment["CUDA_VISIBLE_DEVICES"].split(",")]
        assert len(visible) == len(set(visible)) == len(slot.gpus)
        for gpu, uuid in zip(slot.gpus, visible, strict=True):
            uuids.setdefault((slot.node, gpu), set()).add(uuid)
        for name, value in nodes.environment(slot).items():
            assert environment[name] == value, (slot, name)
    assert all(len(one) == 1 for one in uuids.values())
    assert len(set.union(*uuids.values())) == len(uuids)  # no GPU is another's
    assert set(seen) == set(slots)


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=LONG)])
def test_ranks_and_servers_have_the_devices_of_their_slots(
    cluster: PretendedCluster, tmp_path: Path, every: int
) -> None:
    """Of the 16 ranks and 8 servers of the smallest shipped cluster, started as a run starts them. Each node's Ray has
    other variables, hides its GPUs from such actors and counts from device 8. every: start each such slot; of 6, these
    are one rank and the server on its GPUs, and a rank of the other node."""
    more = ['cluster.env={NCCL_DEBUG="INFO", WANDB_API_KEY=""}', 'rollout.env={NCCL_DEBUG="WARN"}']
    config, plan = shipped("qwen3_30b_a3b.toml", *more)
    held = reserved(2)
    nodes, slots = run_nodes(config, held), plan.slots[::every]
    assert {s.node for s in slots} == {0, 1} and {s.role for s in slots} == {"trainer", "rollout"}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WANDB_API_KEY", "the key")
            actors = {s: nodes.start(Probe, s, tmp_path / f"{s.role}{s.index}.log") for s in slots}
        seen = {slot: ray.get(actor.see.remote(), timeout=WAIT_S) for slot, actor in actors.items()}
        assert [n.address for n in nodes.nodes] == ["127.0.0.9", "127.0.0.12"]
        assert [d.index for d in nodes.facts[0].devices] == list(range(FIRST_DEVICE, FIRST_DEVICE + 8))
        check_seen(slots, nodes, seen)
        for slot, environment in seen.items():
            assert ray.get(actors[slot].node.remote(), timeout=WAIT_S) == nodes.of(slot).id
            trains = slot.role == "trainer"
            assert environment["NCCL_DEBUG"] == ("INFO" if trains else "WARN")
            assert environment.get("WANDB_API_KEY") == ("the key" if trains else None)
            assert environment["OMP_NUM_THREADS"] == str(max(1, nodes.facts[slot.node].cores // 8))
        assert free_gpus().get(nodes.nodes[0].id, 0) == 0
    finally:
        held.release()
    assert all_are_free()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("qwen3_30b_a3b.toml", (), marks=LONG),
        pytest.param("qwen3_30b_a3b.toml", ("cluster.pools.trainer.gpus=0-3", "parallel.dp=2", "rollout.servers=4",
                                            "cluster.pools.rollout.gpus=4-7"), marks=LONG),
        ("qwen3_30b_a3b.toml", ("cluster.pools.trainer.gpus=0-3", "parallel.dp=2", "rollout.servers=4",
                                "cluster.pools.rollout.nodes=1")),
    ],
)  # fmt: skip
def test_every_slot_of_a_node_has_its_devices(
    cluster: PretendedCluster, tmp_path: Path, name: str, more: Sequence[str]
) -> None:
    """One process a node takes the variables of each of its slots in turn."""
    probe_slots(name, more, tmp_path)


@LONG
@pytest.mark.parametrize(("name", "count"), [("deepseek_v3_fp8.toml", 16), ("kimi_k2_int4_qat.toml", 32)])
def test_every_slot_of_a_large_cluster_has_its_devices(tmp_path: Path, name: str, count: int) -> None:
    ray.shutdown()
    with pretended_cluster(range(10 + count, 10, -1), RAYLET):
        assert len(probe_slots(name, (), tmp_path).nodes) == count


def probe_slots(name: str, more: Sequence[str], logs: Path) -> RunNodes:
    config, plan = shipped(name, *more)
    held = reserve(
        config.cluster.nodes, config.cluster.gpus_per_node, run="a", when_busy="refuse", timeout_s=600, say=print
    )
    nodes = run_nodes(config, held)
    try:
        by_node = {k: [s for s in plan.slots if s.node == k] for k in range(config.cluster.nodes)}
        asked = {}
        for k, slots in by_node.items():
            probe = nodes.start(Probe, slots[0], logs / f"probe{k}.log")
            asked[k] = probe, probe.see_after.remote([nodes.environment(s) for s in slots])
        seen: dict[Slot, Mapping[str, str]] = {}
        for k, (probe, ref) in asked.items():
            assert ray.get(probe.node.remote(), timeout=600) == nodes.nodes[k].id
            for slot, environment in zip(by_node[k], ray.get(ref, timeout=600), strict=True):
                seen[slot] = environment
        check_seen(plan.slots, nodes, seen)
    finally:
        held.release()
    assert all_are_free()
    return nodes


def test_a_missing_node_is_named_within_the_limit(cluster: PretendedCluster) -> None:
    began = time.monotonic()
    with refuses(ValueError, 3, 8, "127.0.0.9", "127.0.0.12", "cluster.nodes", unrecorded="it names this machine"):
        reserved(3, timeout_s=2)
    assert time.monotonic() - began < 15
    assert all_are_free()


def test_a_gpu_that_another_job_has_is_named(cluster: PretendedCluster) -> None:
    """With one GPU gone nothing of the run is reserved, and a run of one node takes the other."""
    taken = next(n for n in living_nodes() if n.address == "127.0.0.9")

    @ray.remote(num_gpus=1, num_cpus=0)
    class Other:
        def there(self) -> bool:
            return True

    other = Other.options(scheduling_strategy=on_node(taken.id)).remote()  # type: ignore[attr-defined]
    ray.get(other.there.remote(), timeout=WAIT_S)
    try:
        with refuses(ValueError, "127.0.0.9 has 7 of 8 GPUs free", "another Ray job", "cluster.when_busy"):
            reserved(2, timeout_s=3)
        one = reserved(1)
        assert [n.address for n in one.nodes] == ["127.0.0.12"]
        one.release()
    finally:
        ray.kill(other)
    assert all_are_free()


RUNS = """
import sys, time
from miles_like.nodes.reservation import reserve
from miles_like.nodes.session import start_ray
start_ray(sys.argv[1])
held = reserve(2, 8, run="/runs/first", when_busy="refuse", timeout_s=60, say=print)
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_run_is_refused_or_queued_until_the_first_is_killed(cluster: PretendedCluster) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", RUNS, cluster.address], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        with pytest.raises(ValueError) as refused:
            reserved(2, "/runs/second", timeout_s=2)
        check_refusal(
            str(refused.value), "/runs/first", first.pid, "127.0.0.9", "cluster.when_busy", unrecorded="it names a host"
        )
        said: list[str] = []
        kill = threading.Timer(3, first.send_signal, [signal.SIGKILL])
        kill.start()
        held = reserve(2, 8, run="/runs/second", when_busy="queue", timeout_s=WAIT_S, say=said.append)
        assert len(said) == 1 and said[0].startswith("queued for") and "/runs/first" in said[0]
        assert [len(f.devices) for f in held.facts] == [8, 8]
        held.release()
    finally:
        first.kill()
        first.wait(30)
    assert all_are_free()


def test_a_late_node_is_taken_when_it_comes(cluster: PretendedCluster) -> None:
    """Last, because the cluster has three nodes then. The late one has the smallest address and so becomes node 0."""
    said: list[str] = []
    found: list[Reservation] = []
    waits = threading.Thread(
        target=lambda: found.append(
            reserve(3, 8, run="a", when_busy="refuse", timeout_s=WAIT_S, say=said.append),
        )
    )
    waits.start()
    time.sleep(1)
    cluster.add([3])
    waits.join(WAIT_S)
    assert [n.address for n in found[0].nodes] == ["127.0.0.3", "127.0.0.9", "127.0.0.12"]
    assert "2 of 3 nodes with 8 GPUs each" in said[0]
    found[0].release()

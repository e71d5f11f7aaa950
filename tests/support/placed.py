"""Where the processes of every shipped cluster configuration belong, written down, and a probe of where they are.

What a process should see is computed from this table, the addresses of the nodes and `uuid_of`, never by the code that
places processes and makes their environment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import ray

from miles_like.cluster.environment import driver_secrets
from miles_like.cluster.placement import PlacementPlan, Role, Slot, plan_placement
from miles_like.cluster.run_nodes import RunNodes
from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.nodes.members import free_gpus, living_nodes
from miles_like.nodes.reservation import Reservation, reserve
from tests.support.pretended import Probe, Seen, uuid_of

CONFIGS = sorted(
    path
    for path in (Path(__file__).parents[2] / "configs").glob("*.toml")
    if (c := load_config(path).cluster).nodes >= 1 and c.gpus_per_node > 0
)
WAIT_S = 600.0
Place = tuple[int, int]  # (node, position of a GPU among the node's that the run has)
RANKS = ("trainer", "critic", "reference")
Process = tuple[Role, int, int]  # (role, number, part of a server that spans nodes)


@dataclass(frozen=True, slots=True)
class Placed:
    """The GPUs of each rank, in order, and of the servers, in groups of `width`. per_node: GPUs that a node's Ray has,
    which are the second half of those of its nvidia-smi. critic, reference: as `ranks`, of roles with a pool.
    teachers: as `servers`, in groups of `teacher_width`."""

    ranks: Sequence[Place]
    servers: Sequence[Place]
    width: int
    per_node: int = 8
    teachers: Sequence[Place] = ()
    critic: Sequence[Place] = ()
    reference: Sequence[Place] = ()
    teacher_width: int | None = None  # None: `width`

    @property
    def nodes(self) -> int:
        every = (self.ranks, self.servers, self.teachers, self.critic, self.reference)
        return 1 + max(node for places in every for node, _ in places)

    def processes(self) -> dict[Process, tuple[int, tuple[int, ...]]]:
        """(node, positions of its GPUs) of every process."""
        out: dict[Process, tuple[int, tuple[int, ...]]] = {}
        ranks: dict[Role, Sequence[Place]] = {
            "trainer": self.ranks,
            "critic": self.critic,
            "reference": self.reference,
        }
        for role, of_role in ranks.items():
            out |= {(role, rank, 0): (node, (gpu,)) for rank, (node, gpu) in enumerate(of_role)}
        servers: dict[Role, Sequence[Place]] = {"rollout": self.servers, "teachers": self.teachers}
        for role, of_role in servers.items():
            width = self.teacher_width or self.width if role == "teachers" else self.width
            for first in range(0, len(of_role), width):
                places = of_role[first : first + width]
                for part, node in enumerate(sorted({node for node, _ in places})):
                    gpus = tuple(gpu for of, gpu in places if of == node)
                    out[role, first // width, part] = node, gpus
        return out


def places(nodes: Sequence[int], gpus: Sequence[int] = range(8)) -> tuple[Place, ...]:
    """Node by node."""
    return tuple((node, gpu) for node in nodes for gpu in gpus)


def colocated(nodes: int, width: int, gpus: int = 8) -> Placed:
    """A rank on each of the first `gpus` GPUs of the nodes and, over all of them, servers of `width` GPUs."""
    there = places(range(nodes), range(gpus))
    return Placed(there, there, width)


PLACED = {
    "deepseek_v3_fp8": colocated(16, 32),  # four servers over four nodes each
    "glm45_air": colocated(2, 8),
    "kimi_k2_int4_qat": colocated(32, 16),  # sixteen servers over two nodes each
    "moonlight_16b_a3b": colocated(1, 2),
    "opd_deepseek_v3": replace(  # the teacher's server is on the two nodes after the student's
        colocated(2, 2), teachers=places((2, 3)), teacher_width=16
    ),
    "qwen3_0_6b": colocated(1, 1, gpus=1),
    "qwen3_0_6b_24gb": colocated(1, 1, gpus=1),
    "qwen3_235b_a22b": colocated(16, 16),  # eight servers over two nodes each
    "qwen3_30b_a3b": colocated(2, 2),
    "qwen3_30b_a3b_fp8": colocated(2, 2),
    "qwen3_30b_a3b_fp8_node": colocated(1, 2),
    "qwen3_30b_a3b_int4_qat": colocated(2, 2),
    "qwen3_30b_a3b_int4_qat_node": colocated(1, 2),
    "qwen3_30b_a3b_node": colocated(1, 2),
    "qwen3_30b_a3b_nvfp4": colocated(2, 2),
    "qwen3_4b": colocated(1, 1),
    "rehearsal_deepseek_v3": colocated(1, 8),
    "rehearsal_qwen3_30b": colocated(1, 2),
}
TABLES = (  # of variables, in each configuration that is probed
    'cluster.env={NCCL_DEBUG="INFO", WANDB_API_KEY=""}',
    'rollout.env={NCCL_DEBUG="WARN", SGLANG_JIT_DEEPGEMM_FAST_WARMUP="1"}',
)
SECRET = {"WANDB_API_KEY": "the key"}  # in the driver's environment
RAYLET = {  # of each node's Ray, whose workers inherit it
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # hides all GPUs from actors without num_gpus
    "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
    "OMP_NUM_THREADS": "77",
    "NCCL_DEBUG": "WRONG",
    "GLOO_SOCKET_IFNAME": "wrong0",
}


def shipped(path: Path, *more: str) -> tuple[RunConfig, PlacementPlan, Placed]:
    """A configuration with TABLES, its plan, and where its processes belong."""
    assert path.stem in PLACED, f"{path.name} is a cluster configuration: write where its processes belong into PLACED"
    config = load_config(path, [*TABLES, *more])
    return (
        config,
        plan_placement(config.cluster, config.parallel, config.servers, config.teacher_rollouts),
        PLACED[path.stem],
    )


def run_nodes(config: RunConfig, held: Reservation) -> RunNodes:
    return RunNodes(nodes=held.nodes, facts=held.facts, cluster=config.cluster, server_env=config.rollout.env)


@contextmanager
def reserved(count: int, gpus: int = 8) -> Iterator[Reservation]:
    """That many nodes with so many GPUs, which are free again afterwards."""
    held = reserve(count, gpus, run="a", when_busy="refuse", timeout_s=WAIT_S, say=print)
    try:
        yield held
    finally:
        held.release()
    assert all_are_free()


def probe(config: RunConfig, plan: PlacementPlan, held: Reservation, logs: Path) -> dict[Process, Seen]:
    """What every process of the plan would see: on each node the first is started as a run starts it, and takes the
    variables of the others in turn."""
    nodes = run_nodes(config, held)
    by_node: dict[str, list[Slot]] = {}
    for slot in plan.slots:
        by_node.setdefault(nodes.of(slot).id, []).append(slot)
    seen: dict[Process, Seen] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRET.items():
            patch.setenv(name, value)
        asked = []
        for number, slots in enumerate(by_node.values()):
            actor = nodes.start(Probe, slots[0], logs / f"probe{number}.log")
            others = [nodes.environment(s) | driver_secrets(nodes._env(s)) for s in slots[1:]]
            asked.append((slots, actor, actor.see.remote(), actor.see_after.remote(others)))
        for slots, _, own, others in asked:  # the actors live as long as their handles
            found = [ray.get(own, timeout=WAIT_S), *ray.get(others, timeout=WAIT_S)]
            seen |= {(s.role, s.index, s.node_rank): one for s, one in zip(slots, found, strict=True)}
    return seen


def check_light(seen: Mapping[Process, Seen]) -> None:
    """No probe has imported what takes seconds and gigabytes: hundreds fit on this machine."""
    assert not any(one.modules & {"torch", "megatron", "transformers", "sglang"} for one in seen.values())


def check_seen(
    seen: Mapping[Process, Seen], placed: Placed, hosts: Sequence[int], given: Mapping[str, str] | None = None
) -> None:
    """Every process is on its node, has its GPUs and no other, and its variables and no others; rank and server of a
    GPU have the same one. hosts: of the nodes 127.0.0.`host`, in the order of the run. given: variables of the run's
    tables beside those of TABLES."""
    processes = placed.processes()
    by_place: dict[Place, set[str]] = {}
    for process, one in seen.items():
        node, gpus = processes[process]
        assert one.address == f"127.0.0.{hosts[node]}", process
        indices = [placed.per_node + gpu for gpu in gpus]
        assert one.devices == tuple(uuid_of(hosts[node], index) for index in indices), process
        wanted = variables(process[0], one.address, indices, placed.per_node) | dict(given or {})
        assert not (different := sorted(one.set_here.items() ^ wanted.items())), (process, different)
        for gpu, uuid in zip(gpus, one.devices, strict=True):
            by_place.setdefault((node, gpu), set()).add(uuid)
    assert all(len(uuids) == 1 for uuids in by_place.values())
    assert len(set.union(*by_place.values())) == len(by_place)


def variables(role: Role, address: str, indices: Sequence[int], per_node: int) -> dict[str, str]:
    """What a process has that its node's Ray has not. address: of its node. indices: of its GPUs in nvidia-smi.
    per_node: GPUs of the node's Ray. All shipped configurations name the same directory on the nodes' disks."""
    common = {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, indices)),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // per_node)),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }
    base = f"/local_nvme/miles-like/kernels/{'trainer' if role in RANKS else 'engine'}"
    caches = {
        "TRITON_CACHE_DIR": f"{base}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{base}/inductor",
        "CUDA_CACHE_PATH": f"{base}/nv",
    }
    if role in RANKS:
        return common | caches | SECRET | {"NCCL_DEBUG": "INFO", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    engine = {
        "SGLANG_HOST_IP": address,
        "SGLANG_CACHE_DIR": base,
        "SGLANG_JIT_CACHE_DIR": f"{base}/jit",
        "FLASHINFER_WORKSPACE_BASE": base,
        "TILELANG_CACHE_DIR": f"{base}/tilelang",
    }
    return common | caches | engine | {"NCCL_DEBUG": "WARN", "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "1"}


def all_are_free(seconds: float = 30.0) -> bool:
    """Whether Ray reports all GPUs of the cluster as free within that time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        free = free_gpus()
        if all(free.get(n.id, 0) == n.gpus for n in living_nodes()):
            return True
        time.sleep(0.2)
    return False

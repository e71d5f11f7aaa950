"""A run's processes are on the nodes and devices of its plan, with their variables, for every shipped configuration.

Ray runs with nodes on this machine that have pretended GPUs: it counts and assigns them, an nvidia-smi on each node
names them, and CUDA is never asked. Not covered: several machines, GPUs. Nodes that are missing, late or busy are in
tests/miles_like/run/setup/test_run_cluster.py, clusters of 16 and 32 nodes in test_large_clusters.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from miles_like.nodes.members import free_gpus
from miles_like.nodes.reservation import Reservation
from tests.support import placed
from tests.support.chosen import later
from tests.support.placed import (
    CONFIGS,
    PLACED,
    RAYLET,
    SECRET,
    WAIT_S,
    Placed,
    check_light,
    check_seen,
    places,
    probe,
    reserved,
    shipped,
)
from tests.support.pretended import Probe, pretended_cluster

QWEN = next(path for path in CONFIGS if path.stem == "qwen3_30b_a3b")
SMALL = [path for path in CONFIGS if path.stem not in PLACED or PLACED[path.stem].nodes <= 2]
# of one node, as those in slots are of two; and what is not in the table yet
FIRST = [path for path in SMALL if path.stem not in PLACED or path.stem == "moonlight_16b_a3b"]
HERE = "tests/miles_like/cluster/test_run_nodes.py"
LONG = pytest.mark.long(beside=HERE)
HOSTS = [9, 12]  # in the order of the run


@pytest.fixture(scope="module")
def held() -> Iterator[Reservation]:
    """Two nodes of 8 GPUs, of which the one with the larger address has joined first, beside a head without."""
    with pretended_cluster(HOSTS[::-1], RAYLET), reserved(2) as both:
        yield both


@pytest.mark.parametrize("every", later([6, 1], [6], beside=HERE))
def test_ranks_and_servers_are_started_in_their_slots(held: Reservation, tmp_path: Path, every: int) -> None:
    """Of the 16 ranks and 8 servers of the smallest shipped cluster, started as a run starts them, all at once. Each
    node's Ray has other variables, hides its GPUs from such actors, and names them in another order than nvidia-smi.
    every: start each such slot; of 6, these are one rank and the server on its GPUs, and a rank of the other node."""
    config, plan, wanted = shipped(QWEN)
    slots = plan.slots[::every]
    assert {s.node for s in slots} == {0, 1} and {s.role for s in slots} == {"trainer", "rollout"}
    nodes = placed.run_nodes(config, held)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRET.items():
            patch.setenv(name, value)
        actors = {s: nodes.start(Probe, s, tmp_path / f"{s.role}{s.index}.log") for s in slots}
    seen = {(s.role, s.index, s.node_rank): ray.get(a.see.remote(), timeout=WAIT_S) for s, a in actors.items()}
    check_light(seen)
    check_seen(seen, wanted, HOSTS)
    assert len(seen) == len(slots) and not any(free_gpus().get(n.id, 0) for n in held.nodes)


@pytest.mark.parametrize("path", later(SMALL, FIRST, beside=HERE), ids=lambda p: p.stem)
def test_every_process_of_a_configuration_has_its_node_and_devices(
    held: Reservation, tmp_path: Path, path: Path
) -> None:
    config, plan, wanted = shipped(path)
    seen = probe(config, plan, held, tmp_path)
    assert seen.keys() == wanted.processes().keys()
    check_light(seen)
    check_seen(seen, wanted, HOSTS)


@pytest.mark.parametrize(
    ("rollout", "servers"),
    [pytest.param("gpus=4-7", places([0, 1], [4, 5, 6, 7]), marks=LONG), ("nodes=1", places([1]))],
    ids=["beside on each node", "on the second node, half of it shared"],
)
def test_pools_part_and_share_the_gpus_of_a_node(
    held: Reservation, tmp_path: Path, rollout: str, servers: tuple[placed.Place, ...]
) -> None:
    """Eight ranks on four GPUs of each node, and four servers of two GPUs."""
    pools = ("cluster.pools.trainer.gpus=0-3", "parallel.dp=2", "rollout.servers=4", f"cluster.pools.rollout.{rollout}")
    config, plan, _ = shipped(QWEN, *pools)
    wanted = Placed(places([0, 1], [0, 1, 2, 3]), servers, 2)
    seen = probe(config, plan, held, tmp_path)
    assert seen.keys() == wanted.processes().keys()
    check_seen(seen, wanted, HOSTS)


TAUGHT = (  # by two teachers, each on a server that the run starts
    "distillation.mode=added",
    "distillation.teachers.a={path='owner/a',sources=['a']}",
    "distillation.teachers.b={path='owner/b'}",
)
APART = ("algorithm.name=ppo", "algorithm.kl_coefficient=0.1", "parallel.dp=1", "parallel.ep=4", "rollout.servers=2")


@pytest.mark.parametrize(
    ("pools", "wanted"),
    [
        (
            ("trainer.gpus=0-1", "critic.gpus=2-3", "reference.gpus=4-5", "rollout.gpus=6-7"),
            Placed(
                places([0, 1], [0, 1]),
                places([0, 1], [6, 7]),
                2,
                critic=places([0, 1], [2, 3]),
                reference=places([0, 1], [4, 5]),
            ),
        ),
        pytest.param(
            ("trainer.nodes=0", "critic={nodes='1',gpus='0-3'}", "reference={nodes='1',gpus='4-7'}", "rollout.nodes=0"),
            Placed(
                places([0], range(4)), places([0], range(4)), 2, critic=places([1], range(4)),
                reference=places([1], range(4, 8)),
            ),
            marks=LONG,
        ),
        pytest.param(
            ("trainer.nodes=0", "critic={nodes='1',gpus='0-3'}", "reference={nodes='0',gpus='4-7'}", "rollout.nodes=1"),
            Placed(
                places([0], range(4)), places([1], range(4)), 2, critic=places([1], range(4)),
                reference=places([0], range(4, 8)),
            ),
            marks=LONG,
        ),
    ],
    ids=["each beside the others on each node", "two nodes", "the critic shares GPUs with the rollout"],
)  # fmt: skip
def test_critic_and_reference_have_the_gpus_of_their_pools(
    held: Reservation, tmp_path: Path, pools: tuple[str, ...], wanted: Placed
) -> None:
    config, plan, _ = shipped(QWEN, *APART, *(f"cluster.pools.{pool}" for pool in pools))
    seen = probe(config, plan, held, tmp_path)
    assert seen.keys() == wanted.processes().keys() and len(seen) == 3 * 4 + 2
    check_light(seen)
    check_seen(seen, wanted, HOSTS)


@pytest.mark.parametrize(
    ("pools", "wanted"),
    [
        (
            ("trainer.gpus=0-1", "rollout.gpus=2-3", "teachers.gpus=4-7"),
            Placed(places([0, 1], [0, 1]), places([0, 1], [2, 3]), 2, teachers=places([0], range(4, 8))),
        ),
        pytest.param(
            ("trainer.nodes=0", "rollout.nodes=0", "teachers={nodes='1',gpus='2-5'}"),
            Placed(places([0], range(4)), places([0], range(4)), 2, teachers=places([1], range(2, 6))),
            marks=LONG,
        ),
    ],
    ids=["beside the others on each node", "on the second node"],
)
def test_servers_of_teachers_have_the_gpus_of_their_pool(
    held: Reservation, tmp_path: Path, pools: tuple[str, ...], wanted: Placed
) -> None:
    config, plan, _ = shipped(QWEN, *APART[2:], *TAUGHT, *(f"cluster.pools.{pool}" for pool in pools))
    seen = probe(config, plan, held, tmp_path)
    assert seen.keys() == wanted.processes().keys() and len(seen) == 4 + 2 + 2
    check_light(seen)
    check_seen(seen, wanted, HOSTS)

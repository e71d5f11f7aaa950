"""Which process sits where: arithmetic that a cluster's bill depends on."""

import pytest

from megatron_bridge.config import ParallelConfig
from miles_like.cluster.placement import plan_placement
from miles_like.config.cluster import ClusterConfig
from rollout.config import RolloutConfig, SGLangFlags
from tests.support.refusals import Facts, refuses


def rollout(servers: int, tp: int) -> RolloutConfig:
    return RolloutConfig(engine="sglang", servers=servers, sglang=SGLangFlags(tp_size=tp))


def test_ranks_fill_nodes_in_order_and_wide_servers_take_whole_nodes() -> None:
    """Tensor-parallel neighbours must share NVLink; a server of 32 GPUs is four nodes with ranks 0..3."""
    plan = plan_placement(ClusterConfig(nodes=16, gpus_per_node=8), ParallelConfig(tp=8, dp=16), rollout(4, 32))
    assert [(s.node, s.gpus) for s in plan.of("trainer")] == [(r // 8, (r % 8,)) for r in range(128)]
    parts = [(s.index, s.node, s.node_rank, s.nnodes, len(s.gpus)) for s in plan.of("rollout")]
    assert parts == [(s, 4 * s + k, k, 4, 8) for s in range(4) for k in range(4)]


def test_without_colocation_no_gpu_is_used_twice() -> None:
    cluster = ClusterConfig(nodes=3, gpus_per_node=8, colocate=False)
    plan = plan_placement(cluster, ParallelConfig(dp=12), rollout(2, 4))
    used = [(s.node, g) for s in plan.slots for g in s.gpus]
    assert len(used) == len(set(used)) == 12 + 8
    assert {s.node for s in plan.of("rollout")} == {2}


@pytest.mark.parametrize(
    ("servers", "tp", "facts"),
    [(1, 3, ("rollout.sglang.tp_size", 3, "cluster.gpus_per_node")), (3, 8, ("cluster.nodes",))],
)
def test_a_server_that_does_not_fit_is_refused_with_both_numbers(servers: int, tp: int, facts: Facts) -> None:
    with refuses(ValueError, *facts):
        plan_placement(ClusterConfig(nodes=2, gpus_per_node=8), ParallelConfig(dp=16), rollout(servers, tp))


def test_a_cpu_run_has_no_gpus() -> None:
    plan = plan_placement(ClusterConfig(), ParallelConfig(dp=2, ep=2), RolloutConfig())
    assert [s.gpus for s in plan.slots] == [(), (), ()]
    assert plan.nodes == 1

"""Which process sits where: arithmetic that a cluster's bill depends on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_bridge.config import ParallelConfig
from miles_like.cluster.placement import PlacementPlan, Role, plan_placement
from miles_like.config.load import load_config
from miles_like.config.sections.cluster import ClusterConfig, PoolConfig, PoolsConfig, format_ranges, parse_ranges
from rollout.config import RolloutConfig, SGLangFlags
from tests.support.refusals import Facts, refuses

CONFIGS = Path(__file__).parents[3] / "configs"


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


def pools(**named: tuple[str | None, str | None]) -> PoolsConfig:
    """role=(nodes, gpus)."""
    return PoolsConfig(**{role: PoolConfig(nodes=nodes, gpus=gpus) for role, (nodes, gpus) in named.items()})


def places(plan: PlacementPlan, role: Role) -> list[tuple[int, int]]:
    return [(s.node, gpu) for s in plan.of(role) for gpu in s.gpus]


def test_each_node_can_be_halved_between_the_sides() -> None:
    named = pools(trainer=(None, "0-3"), rollout=(None, "4-7"))
    cluster = ClusterConfig(nodes=4, gpus_per_node=8, pools=named)
    plan = plan_placement(cluster, ParallelConfig(tp=4, dp=4), rollout(2, 8))
    assert places(plan, "trainer") == [(node, gpu) for node in range(4) for gpu in range(4)]
    assert places(plan, "rollout") == [(node, gpu) for node in range(4) for gpu in range(4, 8)]
    assert [(s.index, s.node_rank, s.nnodes) for s in plan.of("rollout")] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 2),
        (1, 1, 2),
    ]
    assert not plan.shared_gpus


def test_gpus_are_shared_one_by_one_where_pools_overlap() -> None:
    """The trainer has nodes 0 and 1, the rollout 1 and 2: node 1 is both sides'."""
    named = pools(trainer=("0-1", None), rollout=("1-2", None))
    plan = plan_placement(ClusterConfig(nodes=3, gpus_per_node=2, pools=named), ParallelConfig(dp=4), rollout(4, 1))
    assert plan.shared_gpus == {(1, 0), (1, 1)}


def test_critic_and_reference_and_teachers_have_pools_of_their_own() -> None:
    named = pools(trainer=("0", None), rollout=("1", None), critic=("2", "0-1"), reference=("2", "2-3"))
    named = named.model_copy(update={"teachers": PoolConfig(nodes="1-2")})
    cluster = ClusterConfig(nodes=3, gpus_per_node=4, pools=named)
    plan = plan_placement(cluster, ParallelConfig(dp=2), rollout(1, 4), [rollout(1, 4)] * 2)
    assert [(s.role, s.node, s.gpus) for s in plan.critics()] == [("critic", 2, (0,)), ("critic", 2, (1,))]
    assert places(plan, "reference") == [(2, 2), (2, 3)]
    assert places(plan, "teachers") == [(node, gpu) for node in (1, 2) for gpu in range(4)]
    assert [plan.ports_of(role) for role in ("rollout", "teachers")] == [(0, 3), (1, 3)]
    embedded = plan_placement(cluster, ParallelConfig(dp=2), RolloutConfig(), [RolloutConfig()] * 3)
    assert [(s.node, s.gpus) for s in embedded.of("teachers")] == [(1, ()), (2, ()), (1, ())]  # on CPU
    assert plan.nodes == 3
    alone = plan_placement(
        ClusterConfig(nodes=1, gpus_per_node=4), ParallelConfig(dp=2), RolloutConfig(), [RolloutConfig()] * 6
    )
    assert [(s.role, s.node, s.gpus) for s in alone.critics()] == [("critic", 0, (0,)), ("critic", 0, (1,))]
    assert alone.of("reference") == () and {s.node for s in alone.of("teachers")} == {0}


@pytest.mark.parametrize(
    ("gpus", "teachers", "facts"),
    [("4-7", 3, (3, 2, 6, 4, "cluster.pools.teachers")), ("5-7", 1, (2, 3, "cluster.pools.teachers"))],
)
def test_servers_of_teachers_that_do_not_fit_their_pool_are_refused(gpus: str, teachers: int, facts: Facts) -> None:
    """A node's GPUs 0-3 are the others'; a server has two."""
    others = (None, "0-3")
    named = pools(trainer=others, rollout=others, teachers=(None, gpus))
    with refuses(ValueError, *facts):
        plan_placement(
            ClusterConfig(nodes=1, gpus_per_node=8, pools=named),
            ParallelConfig(dp=2),
            rollout(1, 2),
            [rollout(1, 2)] * teachers,
        )


@pytest.mark.parametrize(
    ("cluster", "parallel", "servers", "facts"),
    [
        ({"pools": pools(trainer=("0", None))}, {"dp": 16}, 1, (16, 8, "cluster.pools.trainer")),
        ({"pools": pools(critic=(None, "0"))}, {"dp": 4}, 1, (4, 2, "cluster.pools.critic")),
        ({"pools": pools(reference=("1", None))}, {"dp": 16}, 1, (16, 8, "cluster.pools.reference")),
        ({"pools": pools(reference=("0", "4-7"))}, {"dp": 4}, 1, ("cluster.pools.reference", "rollout", 0, 4)),
        ({"pools": pools(trainer=(None, "0-2"))}, {"tp": 2, "dp": 2}, 1, ("parallel.tp", 2, 3)),
        ({"pools": pools(trainer=(None, "0-2"))}, {"tp": 4, "dp": 1}, 1, ("parallel.tp", 4, 3)),
        ({"pools": pools(rollout=(None, "0-2"))}, {"dp": 2}, 1, (2, "cluster.pools.rollout", 3)),
        ({"pools": pools(rollout=("1", "0-1"))}, {"dp": 2}, 2, (2, 4, "cluster.pools.rollout")),
        ({"colocate": False, "pools": pools(rollout=("0", None))}, {"dp": 2}, 1, ("cluster.colocate", 0)),
        ({"colocate": False}, {"dp": 16}, 1, (1, 2, 0, "cluster.nodes")),
        (
            {"colocate": False, "pools": pools(trainer=("0", None), critic=("1", None), rollout=("1", None))},
            {"dp": 2},
            1,
            ("cluster.colocate", 1, 0),
        ),
        (
            {"pools": pools(trainer=("0", None), rollout=("0", None), critic=("1", None), reference=("1", None))},
            {"dp": 2},
            1,
            ("critic", 1, 0),
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_its_pool_is_refused(
    cluster: dict[str, object], parallel: dict[str, int], servers: int, facts: Facts
) -> None:
    """On two nodes of eight GPUs, with servers of two."""
    with refuses(ValueError, *facts):
        plan_placement(
            ClusterConfig.model_validate({"nodes": 2, "gpus_per_node": 8, **cluster}),
            ParallelConfig(**parallel),  # type: ignore[arg-type]
            rollout(servers, 2),
        )


TAUGHT = ["distillation.mode=added", "distillation.teachers.t.path=owner/name"]


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        (["cluster.pools.trainer.nodes=0-2"], ("cluster.pools.trainer.nodes", "0-2", 2, "cluster.nodes")),
        (["cluster.pools.trainer.gpus=7-8"], ("cluster.pools.trainer.gpus", "7-8", 8, "cluster.gpus_per_node")),
        (["cluster.pools.trainer.nodes=1-0"], ("cluster.pools.trainer", "nodes", "1-0")),
        (["cluster.pools.rollout.gpus=0,0"], ("cluster.pools.rollout", "gpus", "0,0")),
        (["cluster.pools.critic.nodes=1"], ("cluster.pools.critic", "grpo")),
        (["cluster.pools.reference.nodes=1"], ("cluster.pools.reference", "grpo")),
        (["cluster.pools.teachers.nodes=1"], ("cluster.pools.teachers", "grpo")),
        (TAUGHT, ("'t'", "[cluster.pools.teachers]", "url")),
        ([*TAUGHT, "cluster.pools.teachers.nodes=1"], ("cluster.pools.teachers", "trainer", 1, 0)),
        (
            [*TAUGHT, "parallel.dp=2", "rollout.servers=4", "cluster.pools.trainer.nodes=0",
             "cluster.pools.rollout.nodes=1", "cluster.pools.teachers={nodes='1',gpus='6-7'}"],
            ("cluster.pools.teachers", "rollout", 1, 6),
        ),
        (
            [*TAUGHT, "rollout.engine=embedded", "cluster.pools.teachers.gpus=1"],
            ("cluster.pools.teachers.gpus", "embedded", "CPU"),
        ),
        (["cluster.pools.rolout.nodes=1"], ("cluster.pools.rollout",)),
        (
            ["algorithm.kl_coefficient=0.1", "algorithm.reference_every=3", "parallel.dp=2", "rollout.servers=4",
             "cluster.pools.trainer.nodes=0", "cluster.pools.rollout.nodes=0", "cluster.pools.reference.nodes=1"],
            ("cluster.pools.reference", "algorithm.reference_every", 3),
        ),
    ],
)  # fmt: skip
def test_a_pool_that_is_not_in_the_cluster_or_of_no_role_is_refused(keys: list[str], facts: Facts) -> None:
    with refuses(ValueError, *facts):
        load_config(CONFIGS / "qwen3_30b_a3b.toml", keys)


SHIPPED = [path.stem for path in sorted(CONFIGS.glob("*.toml")) if load_config(path).cluster.gpus_per_node]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_cluster_is_filled_node_by_node(name: str) -> None:
    """Rank r is on GPU r of the cluster; every server is whole, on consecutive nodes."""
    config = load_config(CONFIGS / f"{name}.toml")
    c, plan = config.cluster, plan_placement(config.cluster, config.parallel, config.servers)
    every = [(node, gpu) for node in range(c.nodes) for gpu in range(c.gpus_per_node)]
    assert places(plan, "trainer") == every[: config.parallel.world_size]
    served = places(plan, "rollout")
    assert served == every[: len(served)] and len(served) == config.rollout.servers * config.rollout.sglang.tp_size
    check_groups(plan, config.parallel, c.gpus_per_node)


def check_groups(plan: PlacementPlan, p: ParallelConfig, width: int) -> None:
    """The rule of the module: megatron's order tp-cp-ep-dp-pp over ranks that fill `width` GPUs of each node."""
    nodes = [s.node for s in plan.of("trainer")]
    for start in range(0, p.world_size, p.tp):
        group = nodes[start : start + p.tp]
        assert len(set(group)) == max(1, p.tp // width)
    stage = p.world_size // p.pp
    for k in range(p.pp - 1):
        last, first = nodes[(k + 1) * stage - 1], nodes[(k + 1) * stage]
        assert first - last in (0, 1)
    experts = p.ep * p.etp
    for start in range(0, p.world_size, experts):
        spans = len(set(nodes[start : start + experts]))
        fewest = -(-experts // width)
        assert spans == fewest if width % experts == 0 or experts % width == 0 else spans <= fewest + 1


@given(st.data())
def test_ranks_and_servers_have_whole_gpus_of_their_pools(data: st.DataObject) -> None:
    """Whatever the split: in its pool, no GPU twice within a role, groups together, the plan's own count of shared
    GPUs."""
    n, per_node = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([1, 2, 4, 8]))
    subset = lambda most: st.sets(st.integers(0, most - 1), min_size=1).map(sorted)  # noqa: E731
    drawn = {role: (data.draw(subset(n)), data.draw(subset(per_node))) for role in ("trainer", "rollout")}
    named = pools(**{role: (format_ranges(tuple(a)), format_ranges(tuple(b))) for role, (a, b) in drawn.items()})
    tp, pp, dp, ep = (data.draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    servers, width = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 4, 8]))
    assume((tp * dp) % ep == 0)
    parallel = ParallelConfig(tp=tp, pp=pp, dp=dp, ep=ep)
    try:
        plan = plan_placement(
            ClusterConfig(nodes=n, gpus_per_node=per_node, pools=named), parallel, rollout(servers, width)
        )
    except ValueError:
        fits = {role: len(a) * len(b) for role, (a, b) in drawn.items()}
        mine, theirs = len(drawn["trainer"][1]), len(drawn["rollout"][1])
        assert (
            parallel.world_size > fits["trainer"]
            or servers * width > fits["rollout"]
            or (mine % tp and tp % mine)
            or (theirs % width and width % theirs)
        )
        return
    assert len(plan.of("trainer")) == parallel.world_size
    for role in ("trainer", "rollout"):
        used = places(plan, role)
        assert len(set(used)) == len(used) and used == sorted(used)
        assert {node for node, _ in used} <= set(drawn[role][0]) and {gpu for _, gpu in used} <= set(drawn[role][1])
    assert plan.shared_gpus == set(places(plan, "trainer")) & set(places(plan, "rollout"))
    assert len(places(plan, "rollout")) == servers * width
    order = {node: k for k, node in enumerate(drawn["trainer"][0])}
    numbered = PlacementPlan(tuple(replace(s, node=order[s.node]) for s in plan.of("trainer")))
    check_groups(numbered, parallel, len(drawn["trainer"][1]))


@given(st.sets(st.integers(0, 200), min_size=1).map(lambda numbers: tuple(sorted(numbers))))
def test_ranges_are_read_as_they_are_written(numbers: tuple[int, ...]) -> None:
    assert parse_ranges(format_ranges(numbers)) == numbers


def test_ranges_are_short() -> None:
    assert format_ranges((0, 1, 2, 3, 8)) == "0-3,8" and parse_ranges(" 8 , 0 - 3") == (0, 1, 2, 3, 8)

"""The layout of a run on the nodes that are left. Not covered: whether the run then trains (tests/cluster)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_bridge.config import ParallelConfig
from miles_like.cluster.placement import PlacementPlan, plan_placement
from miles_like.run.rebuild.layout import plan_on_rest, smaller_layouts
from miles_like.run.setup.model_plan import ModelPlan
from miles_like.run.setup.worker_side import worker_slots
from tests.miles_like.run.test_train import plan_of
from tests.support.refusals import refuses


def spread(*settings: str, nodes: int = 2) -> ModelPlan:
    """Ranks and servers of a run on several nodes in turn."""
    plan = plan_of(f"cluster.nodes={nodes}", *settings, run_dir=Path("run"))
    c = plan.config
    return replace(plan, placement=plan_placement(c.cluster, c.parallel, c.rollout))


def where(placement: PlacementPlan, role: str) -> list[tuple[int, int]]:
    return [(s.index, s.node) for s in placement.slots if s.role == role]


def test_ranks_go_on_in_fewer_rows_and_servers_of_a_lost_node_are_left_out() -> None:
    plan = spread("parallel.dp=2", "parallel.ep=2", "rollout.servers=3")
    assert where(plan.placement, "trainer") == [(0, 0), (1, 1)]
    rest = plan_on_rest(plan, {0})
    assert (rest.config.parallel.dp, rest.config.parallel.ep, rest.config.rollout) == (1, 1, plan.config.rollout)
    assert where(rest.placement, "trainer") == [(0, 1)]
    assert where(rest.placement, "rollout") == [(1, 1)], "it keeps its number"
    assert [(slot.node, own) for slot, own in worker_slots(rest.placement, 1)] == [(1, [1])]
    assert rest.config.cluster == plan.config.cluster and rest.model.trainer.parallel == rest.config.parallel


def test_the_layout_stays_where_another_node_is_in_the_place_or_no_rank_was_there() -> None:
    plan = spread("parallel.dp=2", "parallel.ep=2", "rollout.servers=2")
    rest = plan_on_rest(plan, (), {1})
    assert rest.config.parallel == plan.config.parallel
    assert where(rest.placement, "trainer") == [(0, 0), (1, 1)] and where(rest.placement, "rollout") == [(0, 0)]
    three = spread("parallel.dp=2", "parallel.ep=2", "rollout.servers=3", nodes=3)
    assert where(plan_on_rest(three, {2}).placement, "trainer") == [(0, 0), (1, 1)]


def test_what_does_not_fit_is_refused() -> None:
    with refuses(RuntimeError, "every rollout server", "--resume"):
        plan_on_rest(spread("parallel.dp=2", "parallel.ep=2", "rollout.servers=1"), {0})
    with refuses(RuntimeError, "parallel.pp = 2", "1 of 2 places", "--resume"):
        plan_on_rest(
            spread(
                "parallel.dp=1", "parallel.ep=1", "parallel.pp=2", "parallel.first_stage_layers=1", "rollout.servers=2"
            ),
            {0},
        )


@pytest.mark.parametrize(
    ("parallel", "places", "expected"),
    [
        (ParallelConfig(dp=4, ep=4), 4, [(4, 4), (4, 2), (4, 1), (3, 1), (2, 2), (2, 1), (1, 1)]),
        (ParallelConfig(dp=4, ep=4), 3, [(3, 1), (2, 2), (2, 1), (1, 1)]),
        (ParallelConfig(dp=2, pp=2), 3, [(1, 1)]),
        (ParallelConfig(dp=2, tp=2, ep=4), 2, [(1, 2), (1, 1)]),
        (ParallelConfig(dp=1, tp=2), 1, []),
    ],
)
def test_layouts_are_tried_from_the_largest(
    parallel: ParallelConfig, places: int, expected: list[tuple[int, int]]
) -> None:
    found = list(smaller_layouts(parallel, places))
    assert [(p.dp, p.ep) for p in found] == expected
    assert all(p.world_size <= places and p.model_copy(update={"dp": 1, "ep": 1}) for p in found)

"""Where ranks and servers of a run are once nodes of it are lost: arithmetic only, no Ray."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from megatron_bridge.config import ParallelConfig
from miles_like.cluster.placement import PlacementPlan, Role, Slot
from miles_like.config.run import RunConfig
from miles_like.run.setup.model_plan import ModelPlan, planned_model

RANKS: tuple[Role, ...] = ("trainer", "critic", "reference")


def plan_on_rest(plan: ModelPlan, lost: Collection[int], replaced: Collection[int] = ()) -> ModelPlan:
    """The plan of a run without the nodes of the numbers `lost`: ranks are on places of ranks that are left, in the
    same layout if there are enough, else with fewer data-parallel rows. Servers of which a part was on a lost node, or
    on one of `replaced`, in whose place others are, have no place any more; the others keep theirs and their numbers.

    Raises RuntimeError where no layout fits, and where no server is left.
    """
    gone = servers_of(plan.placement, {*lost, *replaced})
    servers = [s for s in plan.placement.of("rollout") if s.index not in gone]
    if gone and not servers:
        text = f"{named({*lost, *replaced})} lost, and with them every rollout server"
        raise RuntimeError(f"{text}: start Ray on other nodes, {_RESUME}")
    rest = {role: [s for s in plan.placement.of(role) if s.node not in lost] for role in RANKS}
    places = min(len(of) for role, of in rest.items() if plan.placement.of(role))
    why = ""
    for parallel in smaller_layouts(plan.config.parallel, places):
        try:
            return _planned(plan, parallel, rest, servers)
        except ValueError as e:
            why = why or f" ({e})"
    p = plan.config.parallel
    raise RuntimeError(
        f"{named(lost)} lost, and parallel.tp = {p.tp}, parallel.pp = {p.pp}, parallel.cp = {p.cp} do not fit the "
        f"{places} of {p.world_size} places of ranks that are left{why}: start Ray on another node, {_RESUME}"
    )


_RESUME = "then run again with --resume"


def named(nodes: Collection[int]) -> str:
    """`node 1 is`, `nodes 0, 3 are`: by their numbers in the run."""
    numbers = ", ".join(map(str, sorted(nodes)))
    return f"node {numbers} is" if len(nodes) == 1 else f"nodes {numbers} are"


def smaller_layouts(parallel: ParallelConfig, places: int) -> Iterator[ParallelConfig]:
    """Layouts of at most `places` ranks that differ in dp and ep only, the largest first, beginning with `parallel`
    itself where it fits."""
    rows = min(parallel.dp, places * parallel.dp // parallel.world_size)
    for dp in range(rows, 0, -1):
        for ep in (n for n in range(parallel.ep, 0, -1) if parallel.ep % n == 0):
            if parallel.tp * parallel.cp * dp % (ep * parallel.etp) == 0:
                yield parallel.model_copy(update={"dp": dp, "ep": ep})


def servers_of(placement: PlacementPlan, nodes: Collection[int]) -> set[int]:
    """Numbers of the rollout servers of which a part is on one of the nodes."""
    return {s.index for s in placement.of("rollout") if s.node in nodes}


def _planned(
    plan: ModelPlan, parallel: ParallelConfig, rest: dict[Role, list[Slot]], servers: Sequence[Slot]
) -> ModelPlan:
    """Raises ValueError for a layout that does not fit the configuration or the model."""
    config = RunConfig.model_validate(plan.config.model_dump() | {"parallel": parallel.model_dump()})
    world = parallel.world_size
    ranks = [replace(s, index=i) for of in rest.values() for i, s in enumerate(of[:world])]
    slots = (*ranks, *servers, *plan.placement.of("teachers"))
    model = planned_model(config, plan.hf.config, plan.served)
    return replace(plan, config=config, model=model, placement=PlacementPlan(slots))

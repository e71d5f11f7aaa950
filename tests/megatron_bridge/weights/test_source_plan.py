"""Law: every tensor of a model has exactly one source, in every layout; tensors that an engine fuses have the same one;
and the ranks that gather with a source are those of its process groups.

Oracles: the family's table, and megatron's own enumeration of ranks. Not covered: what is gathered
(tests/rollout/publish/sources/test_weights_from_sources.py).
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_bridge.config import ParallelConfig
from megatron_bridge.device.device import init_device
from megatron_bridge.families.registry import family_of
from megatron_bridge.weights.export import _Exporter, _Slot
from megatron_bridge.weights.sources import SourcePlan, sources_of
from tests.support.published import FAMILIES

init_device()

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "pp2": {"pp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "tp2": {"tp": 2},
    "tp2_ep2": {"tp": 2, "ep": 2},
    "pp2_tp2_ep4_dp4": {"pp": 2, "tp": 2, "ep": 4, "dp": 4},
    "pp2_tp4_etp2_ep2_dp2": {"pp": 2, "tp": 4, "etp": 2, "ep": 2, "dp": 2},
    "cp2_ep4_dp4": {"cp": 2, "ep": 4, "dp": 4},
}
MANY = 8


def planned(family: str, layout: ParallelConfig, most: int, bucket_bytes: int = 30_000) -> tuple[SourcePlan, Any]:
    hf = FAMILIES[family]
    tensors = family_of(hf).bind(hf)
    sizes = {"tp": layout.tp, "etp": layout.etp, "ep": layout.ep, "pp": layout.pp}
    groups: Any = SimpleNamespace(
        **{f"{n}_group": SimpleNamespace(size=lambda k=k: k, rank=lambda: 0) for n, k in sizes.items()}
    )
    exporter, local = _Exporter(tensors, groups), tensors.dims.get("experts", 0) // layout.ep
    layers: int = tensors.dims["layers"]
    slots = [
        _Slot(
            stage=layout.pp - 1
            if p.layer is None and "embed" not in p.hf_name
            else (p.layer or 0) * layout.pp // layers,
            entry_index=tensors.entries.index(p.entry),
            layer=p.layer,
            local_expert=p.expert,
            tensor=None,
        )
        for p in tensors.places()
        if p.index == 0 and (p.expert is None or p.expert < local)
    ]
    plan = SourcePlan(sorted(slots, key=exporter.key), exporter, layout, most=most, bucket_bytes=bucket_bytes)
    return plan, tensors


@pytest.mark.parametrize("most", [1, MANY])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_has_one_source(family: str, layout: str, most: int) -> None:
    config = ParallelConfig(**LAYOUTS[layout])
    if "experts" not in family_of(FAMILIES[family]).dims(FAMILIES[family]) and config.ep * config.etp > 1:
        config = config.model_copy(update={"ep": 1, "etp": 1})
    plan, tensors = planned(family, config, most)
    names = [list(plan.names(source)) for source in range(len(plan.sources))]
    assert all(names), "a source without tensors would be a group without a broadcast"
    assert Counter(n for part in names for n in part) == Counter(p.hf_name for p in tensors.places())
    source_of = {n: i for i, part in enumerate(names) for n in part}
    assert all(len({source_of[n] for n in fused}) == 1 for fused in tensors.fused())
    assert config.pp <= len(plan.sources) <= max(most, config.pp) and plan.sources[0].rank == 0
    local = tensors.dims.get("experts", 0) // config.ep
    for place in tensors.places():
        source = plan.sources[source_of[place.hf_name]]
        if place.expert is not None and source.experts is not None:
            assert place.expert // local == source.experts
        assert source.others or place.expert is not None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_those_who_gather_are_the_process_groups_of_the_source(layout: str) -> None:
    from megatron.core.parallel_state import RankGenerator

    c, order = ParallelConfig(**LAYOUTS[layout]), "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=c.tp, ep=1, dp=c.dp, pp=c.pp, cp=c.cp, order=order)
    data = c.world_size // (c.pp * c.etp * c.ep)
    expert = RankGenerator(tp=c.etp, ep=c.ep, dp=data, pp=c.pp, cp=1, order=order)

    def group(generator: Any, kind: str, rank: int) -> set[int]:
        return set(next(g for g in generator.get_ranks(kind) if rank in g))

    for most in (1, MANY):
        plan, _ = planned("deepseek", c, most)
        for number, source in enumerate(plan.sources):
            assert source.stage == next(
                i for i, r in enumerate(sorted(group(dense, "pp", source.rank))) if r == source.rank
            )
            for bucket in plan.chunks(number):
                key = plan._exporter.key(bucket[0])
                found = {rank for rank in range(c.world_size) if plan.holds_shards(rank, number, bucket)}
                if not key.per_expert:
                    assert found == ({source.rank} if key.replicated else group(dense, "tp", source.rank))
                elif source.experts is not None:
                    assert found == group(expert, "tp", source.rank)
                    assert sorted(group(expert, "ep", source.rank)).index(source.rank) == source.experts
                else:
                    assert found == set().union(
                        *(group(expert, "tp", rank) for rank in group(expert, "ep", source.rank))
                    )


def test_the_rule_of_their_number() -> None:
    layout = ParallelConfig(pp=2, ep=4, dp=4)
    assert [s.rank for s in sources_of(layout, most=8, experts=True)] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [s.rank for s in sources_of(layout, most=7, experts=True)] == [0, 4]
    assert [s.rank for s in sources_of(layout, most=8, experts=False)] == [0, 4]
    assert len(sources_of(ParallelConfig(pp=4), most=1, experts=True)) == 4

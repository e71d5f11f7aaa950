"""What ranks fill from the portions of several holders is bit for bit what one process packs and cuts for them.

Groups are divided over holders at random, each holder cuts its own samples' routes for a rank's rows and layers, and
the portions travel as parcels. Not covered: Ray, which carries them.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.batch.packer import Packer
from miles_like.batch.packing import cut_shard, names_of
from miles_like.batch.parcel import Parcel, ParcelRefusedError, refuse_parcels
from miles_like.batch.portion import Portion, filled, portion_of
from miles_like.cluster.workers.holder import ColumnHolder
from miles_like.records import PlannedBatch, RecordGroup
from miles_like.types import Sample, SampleGroup, TrainBatch, VersionSpan
from routing_replay.align import ShardSpec
from routing_replay.rank_routes import RankRoutes, fed_routes
from tests.support.made_samples import assert_same, group, sample
from tests.support.refusals import refuses

PARTS = [
    ShardSpec(layers=(1, 2)),
    ShardSpec(layers=(2,), multiple=4),
    ShardSpec(layers=(1,), cp=2, cp_rank=1),
    ShardSpec(layers=(1, 2), cp=2, cp_rank=0, multiple=2),
]


def made(shapes: Sequence[tuple[int, int]], *, routing: bool) -> list[SampleGroup]:
    """Groups of two; every third prompt has the id of the first, as where an epoch ends."""
    samples, first = list[Sample](), 0
    for i, (p, r) in enumerate(shapes):
        one = sample(f"p{i // 2 % 3}", i % 2, prompt_len=p, response_len=r, first_token=first, routing=routing)
        samples.append(replace(one, streams={"values": one.token_ids / 7}, reward=i / 3))
        first += p + r
    return [group(samples[i : i + 2]) for i in range(0, len(samples), 2)]


class InMemory:
    """A process's own memory."""

    def put(self, value: Parcel[SampleGroup]) -> Parcel[SampleGroup]:
        return value

    def get(self, reference: Parcel[SampleGroup]) -> Parcel[SampleGroup]:
        return reference


def recorded(of: SampleGroup, *, holder: int) -> RecordGroup:
    """What the driver knows of a group."""
    return RecordGroup(prompt=of.prompt, samples=ColumnHolder(holder, InMemory()).keep(of))


def sent(batch: PlannedBatch, samples: dict[str, Sample], row: int, part: ShardSpec) -> list[Portion]:
    """The portions of all holders, as they arrive."""
    out = []
    for holder in sorted({r.holder for r in batch.records.values()}):
        own = {name: samples[name] for name, r in batch.records.items() if r.holder == holder}
        portion = portion_of(batch.grid[row], own, part)
        if portion is not None:
            out.append(pickle.loads(pickle.dumps(Parcel(portion), 5)).value)
    return out


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=2, max_size=20),
    dp=st.integers(1, 3),
    part=st.sampled_from(PARTS),
    routing=st.booleans(),
    data=st.data(),
)
def test_portions_of_all_holders_make_the_batch_of_one_process(
    shapes: list[tuple[int, int]], dp: int, part: ShardSpec, routing: bool, data: st.DataObject
) -> None:
    groups = made(shapes, routing=routing)
    holders = data.draw(st.lists(st.integers(0, 2), min_size=len(groups), max_size=len(groups)))
    advantages = [[float(i) for i, _ in enumerate(g.samples)] for g in groups]
    packs = Packer(dp_size=dp, max_tokens=40)
    (whole,) = packs.steps(groups, advantages)
    records = [recorded(g, holder=h) for g, h in zip(groups, holders, strict=True)]
    (planned,) = packs.steps(records, advantages)
    assert isinstance(whole, TrainBatch) and isinstance(planned, PlannedBatch)
    assert (planned.loss_tokens, planned.versions) == (whole.loss_tokens, whole.versions)

    samples = [s for g in groups for s in g.samples]
    by_name = dict(zip(names_of(samples), samples, strict=True))
    route_bytes = 0
    for row, expected in enumerate(whole.grid):
        portions = sent(planned, by_name, row, part)
        route_bytes += sum(p.route_bytes or 0 for p in portions)
        for own, one, cut in zip(filled(planned.grid[row], portions), expected, cut_shard(expected, part), strict=True):
            assert_same(replace(own, routing=None), replace(one, routing=None))
            assert (own.routing is None) == (cut is None)
            if cut is not None:
                assert isinstance(own.routing, RankRoutes)
                a, b = (fed_routes(r, one.samples, one.tokens, one.cu_seqlens, part) for r in (own.routing, cut))
                assert torch.equal(a.experts, b.experts) and a.layers == b.layers
    assert route_bytes == sum(r.nbytes for row in whole.grid for r in cut_shard(row, part) if r is not None)


def test_a_sample_that_no_holder_sent_is_named() -> None:
    records = [recorded(g, holder=i) for i, g in enumerate(made([(2, 3)] * 4, routing=True))]
    (batch,) = Packer(dp_size=1, max_tokens=40).steps(records, [[1.0, 1.0]] * 2)
    assert isinstance(batch, PlannedBatch)
    held = {s.name: s for s in made([(2, 3)] * 4, routing=True)[0].samples}
    portion = portion_of(batch.grid[0], held, PARTS[0])
    assert portion is not None and portion_of(batch.grid[0], {}, PARTS[0]) is None
    with refuses(ValueError, "p1/0", 1):
        filled(batch.grid[0], [portion])
    with refuses(ValueError, "p0/0"):
        other = portion_of(
            batch.grid[0], {s.name: s for g in made([(2, 3)] * 4, routing=True) for s in g.samples}, PARTS[0]
        )
        assert other is not None
        filled(batch.grid[0], [portion, other])


def test_a_process_that_decides_opens_no_parcel() -> None:
    """Neither do values in a parcel reach it, nor does a record have them."""
    data = pickle.dumps(Parcel(sample(routing=True)), 5)
    back = pickle.loads(data).value
    assert torch.equal(back.token_ids, sample().token_ids) and back.versions == (VersionSpan(0, 0, 3),)
    refuse_parcels("the driver")
    try:
        with pytest.raises(ParcelRefusedError, match="the driver"):
            pickle.loads(data)
    finally:
        refuse_parcels(None)
    (record,) = recorded(group([sample()]), holder=0).samples
    again = pickle.loads(pickle.dumps(record))
    assert again == record or again.length == record.length == 5
    for read in (lambda: again.token_ids.shape, lambda: again.text[:3], lambda: len(again.logprobs)):
        with pytest.raises(RuntimeError, match=r"rollout\.workers"):
            read()

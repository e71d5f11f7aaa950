"""A batch that each rank fills from the samples of that row alone is bit for bit the one that `pack` makes of all.

The process that plans knows lengths, loss counts and prompts alone; a difference would train another step than a run
whose driver holds the tokens. Not covered: how the columns reach the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.batch.filling import fill
from miles_like.batch.packing import names_of, pack
from miles_like.batch.plan import PlanSettings, StepSamples, plan, planned
from miles_like.records import PlannedMicroBatch
from miles_like.types import Aggregation, Sample, SampleGroup
from tests.support.made_samples import assert_same, group, sample
from tests.support.refusals import refuses

Rows = tuple[tuple[PlannedMicroBatch, ...], ...]
shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=24)


def made(shapes: Sequence[tuple[int, int]], *, streams: bool) -> list[SampleGroup]:
    """Groups of two samples; every third prompt has the id of the first, as where an epoch ends."""
    samples, first = list[Sample](), 0
    for i, (p, r) in enumerate(shapes):
        one = sample(f"p{i // 2 % 3}", i % 2, prompt_len=p, response_len=r, first_token=first)
        if streams:
            ids = torch.stack([one.token_ids, one.token_ids + 1], 1)
            one = replace(one, streams={"values": one.token_ids / 7, "pairs": ids / 3}, candidates=ids)
        samples.append(one)
        first += p + r
    return [group(samples[i : i + 2]) for i in range(0, len(samples), 2)]


def by_lengths(groups: Sequence[SampleGroup], advantages: Sequence[float], how: PlanSettings) -> tuple[Rows, int]:
    """The planned rows, made from numbers alone."""
    samples = [s for g in groups for s in g.samples]
    names = names_of(samples)
    of = StepSamples(
        names=names,
        lengths=np.array([len(s.token_ids) for s in samples]),
        counts=np.array([s.response_len for s in samples]),
        prompts=np.repeat(np.arange(len(groups)), [len(g.samples) for g in groups]),
        episodes=np.arange(len(samples)),
        versions=(0, 0),
    )
    found = plan(of, how)
    return planned(found, names, advantages), found.loss_tokens


@settings(max_examples=80, deadline=None)
@given(
    shapes=shapes.filter(lambda found: any(r for _, r in found)),
    how=st.fixed_dictionaries(
        {
            "dp_size": st.integers(1, 4),
            "max_tokens": st.integers(56, 90),
            "micro_multiple": st.integers(1, 3),
            "cost": st.sampled_from([None, lambda n: float(n * n)]),
            "aggregation": st.sampled_from(Aggregation),
            "constant": st.just(7),
            "together": st.booleans(),
        }
    ),
    streams=st.booleans(),
    data=st.data(),
)
def test_each_row_filled_alone_is_that_of_the_whole(
    shapes: list[tuple[int, int]], how: dict[str, Any], streams: bool, data: st.DataObject
) -> None:
    groups = made(shapes, streams=streams)
    samples = [s for g in groups for s in g.samples]
    number = st.floats(-3, 3, width=64)
    advantages = data.draw(st.lists(number, min_size=len(samples), max_size=len(samples)))
    values = iter(advantages)
    batch = pack(groups, [[next(values) for _ in g.samples] for g in groups], **how)
    rows, loss_tokens = by_lengths(groups, advantages, PlanSettings(**how))
    assert loss_tokens == batch.loss_tokens and len(rows) == len(batch.grid)
    columns = dict(zip(names_of(samples), samples, strict=True))
    for row, whole in zip(rows, batch.grid, strict=True):
        own = {name: columns[name] for cell in row for name in cell.samples}
        for filled, expected in zip(fill(row, own), whole, strict=True):
            assert_same(filled, expected)


def test_samples_of_different_streams_are_refused() -> None:
    one, other = sample(), sample(index=1)
    other = replace(other, streams={"values": torch.zeros(len(other.token_ids))})
    rows, _ = by_lengths([group([one, other])], [1.0, 1.0], PlanSettings(dp_size=1, max_tokens=40))
    with refuses(ValueError, "p/1", "['values']", "p/0", "[]"):
        fill(rows[0], {"p/0": one, "p/1": other})

"""The way back from a packed batch to samples.

It must be exact because what comes back (a reference's log-probs, a critic's values) becomes rewards and advantages of
single tokens: a stream that is off by one token, or another sample's, trains on the wrong one without any error.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.batch.packing import pack
from miles_like.batch.unpacking import streams_of, unpack
from miles_like.types import SampleGroup
from tests.support.made_samples import group, sample

shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 14)), min_size=2, max_size=14)


def numbered(shapes: list[tuple[int, int]]) -> list[SampleGroup]:
    """Groups of two samples, all tokens different; every group is of the same prompt, as where an epoch ends."""
    samples, first = [], 1
    for i, (prompt, response) in enumerate(shapes):
        samples.append(sample("p", i % 2, prompt_len=prompt, response_len=response, first_token=first))
        first += prompt + response
    return [group(samples[i : i + 2]) for i in range(0, len(samples), 2)]


@settings(max_examples=60, deadline=None)
@given(shapes=shapes, dp=st.integers(1, 3), multiple=st.integers(1, 2))
def test_what_is_said_of_a_token_comes_back_to_it(shapes, dp, multiple):
    """Each position says the number of its label: a sample's stream is then its own tokens, 0 where not under loss,
    whatever the rows, the packs, the cells without a sample, and samples of one name; [T, C] as well as [T]."""
    shapes[0] = (shapes[0][0], 1 + shapes[0][1])  # one token of all has to be under loss
    groups = numbered(shapes)
    batch = pack(groups, [[0.0] * len(g.samples) for g in groups], dp_size=dp, max_tokens=30, micro_multiple=multiple)
    one = [[m.labels.float() for m in row] for row in batch.grid]
    wide = [[torch.stack([m.labels, -m.labels, m.labels * 0 + 7], 1).float() for m in row] for row in batch.grid]
    got, got_wide = streams_of(groups, batch, one), streams_of(groups, batch, wide)
    for g, of_group, of_group_wide in zip(groups, got, got_wide, strict=True):
        for s, stream, columns in zip(g.samples, of_group, of_group_wide, strict=True):
            want = torch.where(s.loss_mask, s.token_ids.float(), 0.0)
            assert torch.equal(stream, want)
            assert torch.equal(columns, torch.stack([want, -want, 7.0 * s.loss_mask], 1))
    assert len(unpack(batch.grid, one)) == sum(bool(s.response_len) for g in groups for s in g.samples)


def test_what_is_not_under_loss_is_zero_though_it_was_infinite():
    groups = [group([sample("p", 0, prompt_len=3, response_len=2)])]
    batch = pack(groups, [[0.0]], dp_size=1, max_tokens=30)
    values = [[torch.where(m.loss_mask, 1.0, torch.nan) for m in row] for row in batch.grid]
    assert streams_of(groups, batch, values)[0][0].tolist() == [0, 0, 0, 1, 1]

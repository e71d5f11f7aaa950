"""Packing laws.

They must hold because the trainer computes on what `pack` lays out and can no longer see samples: a token lost, doubled
or shifted wrongly trains on the wrong label without any error. Not covered: padding and slicing for tensor and context
parallelism, which the trainer's side does.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_samples import group, rewarded, sample

from miles_like.packing import pack, pack_pairs
from miles_like.types import MicroBatch, SampleGroup, TrainBatch
from routing_replay.trace import RoutingTrace

MAX = 40


def numbered(shapes: list[tuple[int, int]], *, routing: bool = False) -> list[SampleGroup]:
    """Groups of up to two samples, whose tokens are all different numbers; versions count up."""
    samples, first = [], 0
    for i, (p, r) in enumerate(shapes):
        samples.append(
            sample(
                f"p{i // 2}",
                i % 2,
                prompt_len=p,
                response_len=r,
                first_token=first,
                routing=routing,
                version=i,
            )
        )
        first += p + r
    return [group(samples[i : i + 2]) for i in range(0, len(samples), 2)]


def counting(groups: list[SampleGroup]) -> list[list[float]]:
    """Advantage of sample i: i + 1."""
    values = iter(range(1, 1_000_000))
    return [[float(next(values)) for _ in g.samples] for g in groups]


def cells(batch: TrainBatch) -> list[MicroBatch]:
    return [m for row in batch.grid for m in row]


def pieces(m: MicroBatch) -> list[slice]:
    cu = m.cu_seqlens.tolist()
    return [slice(a, b) for a, b in pairwise(cu)]


shapes = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 28)), min_size=1, max_size=24)


@settings(max_examples=60, deadline=None)
@given(shapes=shapes, dp=st.integers(1, 5), multiple=st.integers(1, 3), routing=st.booleans())
def test_every_sample_once_shifted_right_and_within_the_limits(shapes, dp, multiple, routing):
    groups = numbered(shapes, routing=routing)
    batch = pack(groups, counting(groups), dp_size=dp, max_tokens=MAX, micro_multiple=multiple)

    assert len(batch.grid) == dp
    assert len({len(row) for row in batch.grid}) == 1
    assert len(batch.grid[0]) % multiple == 0
    assert max(len(m.tokens) for m in cells(batch)) <= MAX

    seen: Counter[int] = Counter()
    by_first = {
        int(s.token_ids[0]): (s, a) for s, a in zip(flat(groups), chain.from_iterable(counting(groups)), strict=True)
    }
    for m in cells(batch):
        for at in pieces(m):
            if not m.loss_mask[at].any():
                continue  # the dummy: no real sample of this test is without loss
            s, a = by_first[int(m.tokens[at][0])]
            seen[int(m.tokens[at][0])] += 1
            assert torch.equal(m.tokens[at], s.token_ids[:-1])
            assert torch.equal(m.labels[at], s.token_ids[1:])
            assert torch.equal(m.loss_mask[at], s.loss_mask[1:])
            assert torch.equal(m.rollout_logprobs[at], s.logprobs[1:])
            assert torch.equal(m.positions[at], torch.arange(len(s.token_ids) - 1))
            assert m.advantages[at].tolist() == [a] * (len(s.token_ids) - 1)
            if routing:
                assert m.routing is not None and s.routing is not None
                assert torch.equal(m.routing.experts[at], s.routing.experts)
    assert seen == Counter(dict.fromkeys(by_first, 1))
    assert batch.loss_tokens == sum(r for _, r in shapes) == sum(int(m.loss_mask.sum()) for m in cells(batch))
    assert batch.versions == (0, len(shapes) - 1)


def flat(groups: list[SampleGroup]) -> list:
    return [s for g in groups for s in g.samples]


def test_dtypes_are_those_of_the_contract():
    m = cells(pack([rewarded([0, 1])], [[1.0, -1.0]], dp_size=1, max_tokens=MAX))[0]
    assert (m.tokens.dtype, m.labels.dtype, m.positions.dtype) == (torch.int64,) * 3
    assert m.cu_seqlens.dtype == torch.int32 and m.loss_mask.dtype == torch.bool
    assert m.advantages.dtype == m.rollout_logprobs.dtype == torch.float32


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 28)), min_size=8, max_size=40), dp=st.integers(1, 4)
)
def test_rows_are_balanced(shapes, dp):
    """Longest-first greedy: two rows differ by at most one sample's tokens, or the last one placed went wrong."""
    groups = numbered(shapes)
    batch = pack(groups, counting(groups), dp_size=dp, max_tokens=1000)
    loads = [sum(len(m.tokens) for m in row) for row in batch.grid]
    assert max(loads) - min(loads) <= max(p + r - 1 for p, r in shapes)


def test_few_micro_batches():
    """40 samples of 9 inputs into 20-token cells: two a cell, so 20 cells over 2 rows and no dummy."""
    groups = numbered([(4, 6)] * 40)
    batch = pack(groups, counting(groups), dp_size=2, max_tokens=20)
    assert [len(row) for row in batch.grid] == [10, 10]
    assert all(len(m.tokens) == 18 for m in cells(batch))


def test_a_micro_batch_more_rather_than_a_token_too_many():
    """Inputs 5, 5, 4, 3, 3 into 10: two would hold them all, but longest-first gives 9 and 11, so there are three."""
    groups = numbered([(1, 5), (1, 5), (1, 4), (1, 3), (1, 3)])
    loads = [len(m.tokens) for m in cells(pack(groups, counting(groups), dp_size=1, max_tokens=10))]
    assert len(loads) == 3 and sum(loads) == 20 and max(loads) <= 10


def test_fewer_samples_than_rows_get_a_masked_token():
    groups = [group([sample(prompt_len=2, response_len=2, routing=True)])]
    batch = pack(groups, [[1.0]], dp_size=3, max_tokens=MAX)
    dummies = [m for m in cells(batch) if not m.loss_mask.any()]
    assert len(dummies) == 2 and batch.loss_tokens == 2
    for m in dummies:
        assert m.tokens.tolist() == [0] and m.cu_seqlens.tolist() == [0, 1] and m.advantages.tolist() == [0]
        assert m.routing is not None
        m.routing.check()


def test_a_sample_without_response_is_left_out():
    groups = [group([sample(response_len=0), sample(index=1, response_len=3, first_token=10)])]
    batch = pack(groups, [[1.0, 2.0]], dp_size=1, max_tokens=MAX)
    assert cells(batch)[0].tokens.tolist() == [10, 11, 12, 13]


def test_bad_batches_are_refused_with_both_numbers():
    ok = rewarded([0.0, 1.0])
    with pytest.raises(ValueError, match=r"p0/0 has 49 input tokens, a micro-batch holds 40: raise"):
        groups = numbered([(20, 30)])
        pack(groups, counting(groups), dp_size=1, max_tokens=40)
    with pytest.raises(ValueError, match="0 samples in 0 groups"):
        pack([], [], dp_size=1, max_tokens=MAX)
    with pytest.raises(ValueError, match="0 response tokens in 1 samples"):
        pack([group([sample(response_len=0)])], [[1.0]], dp_size=1, max_tokens=MAX)
    with pytest.raises(ValueError, match="1 groups but 2 lists"):
        pack([ok], [[1.0, 1.0], [1.0]], dp_size=1, max_tokens=MAX)
    with pytest.raises(ValueError, match="2 samples but 1 advantages"):
        pack([ok], [[1.0]], dp_size=1, max_tokens=MAX)
    with pytest.raises(ValueError, match="check its rewards for nan"):
        pack([ok], [[1.0, float("nan")]], dp_size=1, max_tokens=MAX)
    with pytest.raises(ValueError, match="1 of 2 samples carry routing"):
        mixed = group([sample(routing=True), sample(index=1)])
        pack([mixed], [[1.0, 1.0]], dp_size=1, max_tokens=MAX)


def test_routing_of_another_model_is_refused():
    other = sample(index=1, routing=True)
    assert other.routing is not None
    wider = RoutingTrace(experts=other.routing.experts, layers=other.routing.layers, num_experts=16)
    object.__setattr__(other, "routing", wider)
    with pytest.raises(ValueError, match="different models"):
        pack([group([sample(routing=True), other])], [[1.0, 1.0]], dp_size=1, max_tokens=MAX)


def test_pairs_put_the_loss_on_the_answer():
    batch = pack_pairs([((5, 6, 7), (8, 9)), ([1], [2])], dp_size=1, max_tokens=MAX)
    m = cells(batch)[0]
    assert m.tokens.tolist() == [5, 6, 7, 8, 1]
    assert m.labels.tolist() == [6, 7, 8, 9, 2]
    assert m.loss_mask.tolist() == [False, False, True, True, True]
    assert m.positions.tolist() == [0, 1, 2, 3, 0] and m.cu_seqlens.tolist() == [0, 4, 5]
    assert batch.loss_tokens == 3 and m.routing is None
    with pytest.raises(ValueError, match="pair 1 of 2 has an empty prompt"):
        pack_pairs([([1], [2]), ([], [2])], dp_size=1, max_tokens=MAX)
    with pytest.raises(ValueError, match="0 pairs"):
        pack_pairs([], dp_size=1, max_tokens=MAX)


def test_512_samples_pack_in_no_time():
    """A guard against a Python loop over tokens; the bound is 20 times what it takes on an idle core."""
    groups = numbered([(8, 1 + i % 12) for i in range(512)], routing=True)
    advantages = counting(groups)
    best = float("inf")
    for _ in range(5):
        t = time.process_time()
        pack(groups, advantages, dp_size=2, max_tokens=4096)
        best = min(best, time.process_time() - t)
    print(f"512 samples packed in {best * 1e3:.1f} ms")
    assert best < 0.2

"""Old tokens that are not trained: what is left, and that packing trains exactly that."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from miles_like.batch.packing import pack
from miles_like.cluster.workers.holder import ColumnHolder
from miles_like.loop.old_tokens import mask_old, masked
from miles_like.records import RecordGroup, SampleRecord
from miles_like.types import Sample, VersionSpan
from tests.support.local_workers import InMemory
from tests.support.made_samples import group, sample

Edges = list[tuple[int, int, int]]


def spans(edges: Edges) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(*e) for e in edges)


def aged(edges: Edges, *, index: int = 0, response_len: int = 6, unsaid: tuple[int, ...] = ()) -> Sample:
    """Two tokens of prompt; routes of the weights that sampled the token after them. unsaid: an environment's."""
    s = sample(index=index, response_len=response_len, first_token=10 * index, routing=True, reward=float(index))
    assert s.routing is not None
    rows = spans([(v, a + 1 if a else 0, b + 1) for v, a, b in edges])
    mask = s.loss_mask.clone()
    mask[[2 + i for i in unsaid]] = False
    return replace(
        s,
        loss_mask=mask,
        logprobs=torch.where(mask, s.logprobs, 0.0),
        versions=spans(edges),
        routing=replace(s.routing, versions=rows),
    )


@pytest.mark.parametrize(
    ("edges", "unsaid", "oldest", "under_loss", "left"),
    [
        ([(3, 0, 6)], (), 3, [2, 3, 4, 5, 6, 7], [(3, 0, 6)]),  # young
        ([(1, 0, 2), (3, 2, 6)], (), 2, [4, 5, 6, 7], [(3, 0, 4)]),
        ([(1, 0, 2), (2, 2, 3), (3, 3, 6)], (), 2, [4, 5, 6, 7], [(2, 0, 1), (3, 1, 4)]),
        ([(1, 0, 2), (3, 3, 6)], (2,), 2, [5, 6, 7], [(3, 0, 3)]),  # an environment's token between
        ([(3, 0, 2), (1, 2, 4), (3, 4, 6)], (), 2, [2, 3, 6, 7], [(3, 0, 2), (3, 4, 6)]),  # weights that went back
        ([(1, 0, 6)], (), 2, [], []),
    ],
)
def test_what_is_left_is_young_and_says_so(
    edges: Edges, unsaid: tuple[int, ...], oldest: int, under_loss: list[int], left: Edges
) -> None:
    young = aged([(3, 0, 6)], index=1)
    before = aged(edges, unsaid=unsaid)
    masked = mask_old(group([before, young]), version=oldest + 1, max_staleness=1)
    assert masked is not None
    got, other = masked.samples
    assert got.loss_mask.nonzero()[:, 0].tolist() == under_loss
    assert got.versions == spans(left)
    assert torch.equal(got.logprobs, torch.where(got.loss_mask, before.logprobs, 0.0))
    assert got.token_ids is before.token_ids and got.routing is before.routing and got.reward == before.reward
    assert other is young and masked.oldest_version == min([3, *(v for v, _, _ in left)])
    again = mask_old(masked, version=oldest + 1, max_staleness=1)
    assert again is not None and again.samples[0] is got


def test_a_group_with_nothing_left_is_none() -> None:
    assert mask_old(group([aged([(1, 0, 6)]), aged([(0, 0, 6)], index=1)]), version=4, max_staleness=2) is None


def recorded(s: Sample) -> SampleRecord:
    (record,) = ColumnHolder(0, InMemory()).records(group([s]))
    return record


def numbers(s: Sample) -> tuple[object, ...]:
    return s.length, s.response_len, s.turns, s.versions


def random_sample(draw: random.Random) -> Sample:
    """Of one to four spans of tokens, which begin at a loss token, with an environment's tokens in between."""
    n = draw.randint(1, 14)
    edges = [0, *sorted(draw.sample(range(1, n), draw.randint(0, min(3, n - 1)))), n]
    versions = [draw.randint(0, 5) for _ in edges[1:]]
    unsaid = tuple(i for i in range(1, n) if draw.random() < 0.3)
    spans_of = [(v, a, b) for v, a, b in zip(versions, edges, edges[1:], strict=False)]
    return aged(spans_of, response_len=n, unsaid=unsaid)


def test_a_record_is_masked_as_its_sample_is() -> None:
    """Also a second time, after further steps, and where a worker masks the sample that it has held since."""
    draw = random.Random(0)
    seen = 0
    for _ in range(300):
        whole = random_sample(draw)
        one, record = group([whole]), RecordGroup(prompt=group([whole]).prompt, samples=(recorded(whole),))
        for version in sorted(draw.choices(range(1, 7), k=2)):
            now = mask_old(one, version=version, max_staleness=0)
            of_record = mask_old(record, version=version, max_staleness=0)
            assert (now is None) == (of_record is None)
            if now is None or of_record is None:
                break
            (s,), (r,) = now.samples, of_record.samples
            assert isinstance(r, SampleRecord) and numbers(s) == numbers(r)
            held = masked(whole, r.oldest)
            assert torch.equal(held.loss_mask, s.loss_mask) and torch.equal(held.logprobs, s.logprobs)
            assert recorded(s).losses == r.losses and held.versions == s.versions
            seen += s.response_len < whole.response_len
            one, record = now, replace(record, samples=of_record.samples)
    assert seen > 100


def test_packing_trains_what_is_left_and_nothing_else() -> None:
    """By hand: of six and six tokens, two and six are old; the loss is the mean of -A log p over the four that stay.
    Packing holds routes to the versions of the tokens under loss: counted from another token they would be refused."""
    old, older = aged([(1, 0, 2), (3, 2, 6)]), aged([(0, 0, 6)], index=1)
    masked = mask_old(group([old, older]), version=3, max_staleness=1)
    assert masked is not None and len(masked.samples) == 2
    batch = pack([masked], [[2.0, -7.0]], dp_size=1, max_tokens=99)
    assert batch.loss_tokens == 4 and batch.versions == (3, 3)
    ((m,),) = batch.grid
    assert m.samples == ("p/0",) and m.labels[m.loss_mask].tolist() == [4, 5, 6, 7]
    weights = torch.ones(len(m.labels)) if m.weights is None else m.weights
    loss = -(m.advantages * m.rollout_logprobs * weights)[m.loss_mask].sum() / batch.loss_tokens
    assert float(loss) == pytest.approx(2.0 * (4 + 5 + 6 + 7) / 1000 / 4)
    assert not m.rollout_logprobs[~m.loss_mask].any()

"""Old tokens that are not trained: what is left, and that packing trains exactly that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from miles_like.batch.packing import pack
from miles_like.loop.old_tokens import mask_old
from miles_like.types import Sample, VersionSpan
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

"""Wrong routes stop at the next boundary they come to, which names the fault: a reply, a packed step, a rank, a router.

Why it must hold: test_routes_are_refused.py shows what the checks can tell; this one shows that no path bypasses
them. Each corruption of "shifted, permuted, dropped, duplicated, out of range, of mixed versions" is made at each place
where it can happen. Not covered: rows that a server itself has shifted or permuted before it sends them, which nothing
on the wire would show (their mismatch would: test_replay_layouts.py).

Letters: S tokens a sample, L MoE layers, K experts a token.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from miles_like.batch.packing import cut_shard
from miles_like.types import Finish, Sample, VersionSpan
from routing_replay.align import ShardSpec
from routing_replay.rank_routes import RankRoutes, fed_routes
from routing_replay.replay import FedRows, RoutingReplayer
from routing_replay.trace import RoutingTrace
from tests.support.made_samples import packed
from tests.support.refusals import Facts, refuses

LAYERS, S, K, E = (1, 2, 3, 5), 12, 4, 16
ALL = "1, 2, 3, 5"
TOKENS = torch.randint(0, 50, (S,), generator=torch.Generator().manual_seed(5))


def trace() -> RoutingTrace:
    """[S-1, 4, K] of TOKENS, sealed, of weights 0."""
    g = torch.Generator().manual_seed(6)
    ids = torch.rand(S - 1, len(LAYERS), E, generator=g).argsort(-1)[..., :K].to(torch.uint8)
    whole = RoutingTrace(experts=ids, layers=LAYERS, num_experts=E)
    return whole.with_checksums(TOKENS[:-1], versions=(VersionSpan(0, 0, S - 1),))


def sample(routing: RoutingTrace, spans: tuple[VersionSpan, ...] = (VersionSpan(0, 0, 8),)) -> Sample:
    """Its last eight tokens under loss."""
    return Sample(
        prompt_id="p7",
        index=3,
        token_ids=TOKENS,
        loss_mask=torch.arange(S) >= 4,
        logprobs=torch.zeros(S),
        routing=routing,
        versions=spans,
        finish=Finish.STOP,
        text="",
    )


def edited(edit: Callable[[Tensor], Tensor]) -> RoutingTrace:
    """Other ids under the same seals."""
    whole = trace()
    return replace(whole, experts=edit(whole.experts.clone()))


def put(ids: Tensor, row: int, col: int, value: Tensor | int) -> Tensor:
    ids[row, col] = value
    return ids


# ---- a reply is read: there only counts and ids can be wrong

WIRE: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Facts]] = {
    "dropped": (lambda x: x[1:], ("routed_experts", 960, 10, 11)),
    "duplicated": (lambda x: x[[0, 0, *range(1, 11)]], (12, 11)),
    "from one row too early": (lambda x: x[[10, *range(11)]], (12, 11)),
    "out of range": (lambda x: at(x, (3, 2, 1), E), (2, 3, "0..15")),
    "negative": (lambda x: at(x, (3, 2, 1), -1), (2, 3, "0..15")),
    "twice in a row": (lambda x: at(x, (3, 2), x[3, 2, 0]), (2, 3)),
    "not captured": (lambda x: at(x, (slice(None), 5), 0), (5, 0, 11)),
    "rotated": (lambda x: x[:, [1, 2, 3, 4, 5, 0]], (0, 0)),
}


def at(ids: np.ndarray, where: tuple[object, ...], value: object) -> np.ndarray:
    ids[where] = value  # type: ignore[index]
    return ids


@pytest.mark.parametrize("fault", WIRE)
def test_a_reply_is_not_read_with(fault: str) -> None:
    edit, facts = WIRE[fault]
    wire = np.frombuffer(base64.b64decode(trace().to_wire(num_layers=6)), "<i4").reshape(S - 1, 6, K).copy()
    payload = base64.b64encode(edit(wire).astype("<i4").tobytes()).decode()
    with refuses(ValueError, "p7/3", *facts):
        RoutingTrace.from_wire(
            payload, tokens=TOKENS, num_layers=6, layers=LAYERS, top_k=K, num_experts=E, sample="p7/3"
        )


# ---- a step is packed: of routes that are to be replayed

PACKED: dict[str, tuple[Callable[[], Sample], Facts]] = {
    "shifted": (lambda: sample(edited(lambda x: x.roll(1, 0))), (ALL, 0, "shifted", 1)),
    "permuted": (lambda: sample(edited(lambda x: x[[0, 1, 4, 2, 3, *range(5, 11)]])), (ALL, 2, 3)),
    "dropped": (lambda: sample(trace().map_rows(lambda x: x[:10])), (10, 12, 11)),
    "duplicated": (
        lambda: sample(edited(lambda x: put(x, 6, slice(None), x[7]))),
        (ALL, 6, 7, "duplicated"),
    ),
    "out of range": (lambda: sample(edited(lambda x: put(x, 3, 1, E + 7))), (2, 3, 1)),
    "rotated": (lambda: sample(edited(lambda x: x.roll(1, 1))), (ALL, 0, "rotated")),
    "of mixed versions": (
        lambda: sample(replace(trace(), versions=(VersionSpan(0, 0, 5), VersionSpan(2, 5, 11)))),
        (5, 2, 0),
    ),
    "of unknown versions": (
        lambda: sample(replace(trace(), versions=(VersionSpan(0, 0, 5),))),
        (5,),
    ),
    "of no reported version": (
        lambda: sample(replace(trace(), versions=None)),
        (3,),
    ),
    "of tokens of no reported version": (
        lambda: sample(trace(), spans=()),
        (3,),
    ),
    "without seals": (lambda: sample(replace(trace(), checksums=None)), ()),
}
VERSIONS = [name for name in PACKED if "version" in name]


@pytest.mark.parametrize("fault", PACKED)
def test_a_step_is_not_packed_with(fault: str) -> None:
    """Beside a sample that is whole; samples can be scored, kept and gone on with before (only a count shows there)."""
    make, facts = PACKED[fault]
    with refuses(ValueError, "p7/3", *facts):
        packed(sample(trace()), replace(make(), index=3))


@pytest.mark.parametrize("fault", VERSIONS)
def test_routes_of_other_weights_are_compared_with_where_they_are_not_replayed(fault: str) -> None:
    """A stock server retracts for want of memory, whatever is asked of it: modes r2 and off have no use for a refusal.
    Routes of other tokens are a fault in any mode."""
    batch = packed(PACKED[fault][0](), replayed=False)
    routing = batch.grid[0][0].routing
    assert isinstance(routing, RoutingTrace) and torch.equal(routing.experts, trace().experts)
    with refuses(ValueError, "shifted", 1):
        packed(PACKED["shifted"][0](), replayed=False)


def test_what_is_whole_is_packed() -> None:
    """With two versions too, each token's row under its version; without loss tokens no version is required."""
    both = replace(trace(), versions=(VersionSpan(0, 0, 5), VersionSpan(1, 5, 11)))
    two = replace(sample(both, spans=(VersionSpan(0, 0, 2), VersionSpan(1, 2, 8))), index=4)
    assert packed(sample(trace()), two).loss_tokens == 16
    silent = replace(sample(replace(trace(), versions=None)), loss_mask=torch.zeros(S, dtype=torch.bool), index=4)
    assert packed(sample(trace()), silent).loss_tokens == 8


# ---- a rank is sent its part

PART = ShardSpec(layers=(2, 3), cp=2, cp_rank=0, multiple=2)


def sent(edit: Callable[[RankRoutes], RankRoutes]) -> RoutingTrace:
    """What the rank of PART feeds of a sample after `edit` on the way there."""
    [[m]] = packed(sample(trace())).grid
    [routes] = cut_shard([m], PART)
    assert routes is not None
    return fed_routes(edit(routes), m.samples, m.tokens, m.cu_seqlens, PART)


def ids(edit: Callable[[Tensor], Tensor]) -> Callable[[RankRoutes], RankRoutes]:
    return lambda r: replace(r, trace=replace(r.trace, experts=edit(r.trace.experts.clone())))


def rows(index: list[int]) -> Callable[[RankRoutes], RankRoutes]:
    """These rows and their seals."""
    return lambda r: replace(
        r, lengths=(len(index),), trace=r.trace.map_rows(lambda x: x[index]), checksums=r.checksums[index]
    )


def other_layers(r: RankRoutes) -> RankRoutes:
    return replace(r, trace=replace(r.trace, layers=(3, 5)))


SENT: dict[str, tuple[Callable[[RankRoutes], RankRoutes], Facts]] = {
    "shifted": (ids(lambda x: x.roll(1, 0)), ("p7/3", "2-3", 0)),
    "shifted with their seals": (rows([4, 0, 1, 2, 3]), ("p7/3", "2-3", 0)),
    "permuted": (ids(lambda x: x[[0, 2, 1, 3, 4]]), ("p7/3", "2-3", 1)),
    "dropped": (rows([0, 1, 2, 4]), ("p7/3", 4, 5)),
    "duplicated": (rows([0, 1, 1, 3, 4]), ("p7/3", "2-3", 2)),
    "one too many": (rows([0, 1, 1, 2, 3, 4]), ("p7/3", 6, 5)),
    "out of range": (ids(lambda x: put(x, 4, 1, E + 3)), ("p7/3", "2-3", 10)),
    "of rotated layers": (ids(lambda x: x.roll(1, 1)), ("p7/3", "2-3", 0)),
    "of other layers": (other_layers, ("p7/3", "3, 5", 0)),
    "of another sample": (lambda r: replace(r, samples=("p7/4",)), ("['p7/4']", "['p7/3']")),
    "for another rank": (
        lambda r: replace(r, shard=replace(PART, cp_rank=1)),
        ("cp_rank=1", "cp_rank=0"),
    ),
}


@pytest.mark.parametrize("fault", SENT)
def test_a_rank_does_not_take_routes_that_are(fault: str) -> None:
    """Of 11 tokens in four chunks of three, one of padding, the first of two ranks has positions 0-2 and 9-10."""
    edit, facts = SENT[fault]
    with refuses(ValueError, *facts):
        sent(edit)


def test_a_rank_takes_its_rows_and_padding_that_a_router_could_choose() -> None:
    whole = sent(lambda r: r)
    want = torch.tensor([0, 1, 2, 9, 10])
    assert torch.equal(whole.experts[:5], trace().experts[want][:, [1, 2]]) and len(whole) == 6
    whole.check()
    assert whole.checksums is None and whole.layers == (2, 3)


# ---- a router asks

FED = FedRows(samples=("p7/3",), ends=torch.tensor([0, 11]), tokens=torch.tensor([0, 1, 2, 9, 10, -1]))
ASKED: dict[str, tuple[Callable[[RoutingReplayer], object], Facts]] = {
    "of another micro-batch": (lambda t: t.topk(1, 2, rows=6), (1, 2)),
    "of another layer": (lambda t: t.topk(0, 1, rows=6), ("p7/3", 1)),
    "for fewer tokens": (lambda t: t.topk(0, 2, rows=4), ("p7/3", 2, "p7/3", 10)),
    "for more tokens": (lambda t: t.topk(0, 2, rows=7), ("p7/3", 2, 7, 6)),
    "twice": (lambda t: (t.topk(0, 3), t.topk(0, 3)), ("p7/3", 3)),
    "never": (lambda t: (t.topk(0, 3), t.assert_drained()), ("p7/3", 2)),
}


@pytest.mark.parametrize("fault", ASKED)
def test_a_router_is_not_given_routes(fault: str) -> None:
    tape = RoutingReplayer()
    tape.load(0, sent(lambda r: r), FED)
    ask, facts = ASKED[fault]
    with refuses(ValueError, *facts):
        ask(tape)

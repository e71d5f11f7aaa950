"""Wrong routes stop at the next boundary they come to, by name: a reply, a step that is packed, a rank, a router.

Why it must hold: test_routes_are_refused.py shows what the checks can tell; this one shows that nobody goes around
them. Each corruption of "shifted, permuted, dropped, duplicated, out of range, of mixed versions" is made at each place
where it can happen. Not covered: rows that a server itself has shifted or permuted before it sends them, which nothing
on the wire would show (their mismatch would: test_replay_layouts.py).

Letters: S tokens a sample, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from miles_like.types import Finish, Sample, VersionSpan
from routing_replay.trace import RoutingTrace
from tests.miles_like.made_samples import packed

LAYERS, S, K, E = (1, 2, 3, 5), 12, 4, 16
ALL = "layers 1, 2, 3, 5"
TOKENS = torch.randint(0, 50, (S,), generator=torch.Generator().manual_seed(5))


def trace() -> RoutingTrace:
    """[S-1, 4, K] of TOKENS, sealed, of weights 0."""
    g = torch.Generator().manual_seed(6)
    ids = torch.rand(S - 1, len(LAYERS), E, generator=g).argsort(-1)[..., :K].to(torch.uint8)
    whole = RoutingTrace(experts=ids, layers=LAYERS, num_experts=E)
    return whole.seal(TOKENS[:-1], versions=(VersionSpan(0, 0, S - 1),))


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


# ---- a step is packed: of routes that are to be replayed

PACKED: dict[str, tuple[Callable[[], Sample], str]] = {
    "shifted": (lambda: sample(edited(lambda x: x.roll(1, 0))), f"{ALL}, position 0: all rows are shifted by 1"),
    "permuted": (lambda: sample(edited(lambda x: x[[0, 1, 4, 2, 3, *range(5, 11)]])), f"{ALL}, position 2: 3 rows"),
    "dropped": (lambda: sample(trace().map_rows(lambda x: x[:10])), "10 routing rows for 12 tokens; want 11"),
    "duplicated": (
        lambda: sample(edited(lambda x: put(x, 6, slice(None), x[7]))),
        f"{ALL}, position 6: .*position 7 .*duplicated",
    ),
    "out of range": (lambda: sample(edited(lambda x: put(x, 3, 1, E + 7))), "layer 2, position 3: 1 rows hold other"),
    "rotated": (lambda: sample(edited(lambda x: x.roll(1, 1))), f"{ALL}, position 0: layers are rotated"),
    "of mixed versions": (
        lambda: sample(replace(trace(), versions=(VersionSpan(0, 0, 5), VersionSpan(2, 5, 11)))),
        "all layers, position 5: the routes were computed under weight version 2, .* under version 0",
    ),
    "of unknown versions": (
        lambda: sample(replace(trace(), versions=(VersionSpan(0, 0, 5),))),
        "all layers, position 5: the routes were computed anew under weights that nobody tells",
    ),
    "of no told version": (
        lambda: sample(replace(trace(), versions=None)),
        "all layers, position 3: no weight version is told for the routes of this sample",
    ),
    "of tokens of no told version": (
        lambda: sample(trace(), spans=()),
        "all layers, position 3: no weight version is told for the token after it, which is under loss",
    ),
    "without seals": (lambda: sample(replace(trace(), seals=None)), "its routes have no seals"),
}
VERSIONS = [name for name in PACKED if "version" in name]


@pytest.mark.parametrize("fault", PACKED)
def test_a_step_is_not_packed_with(fault: str) -> None:
    """Beside a sample that is whole; samples can be scored, kept and gone on with before (only a count shows there)."""
    make, message = PACKED[fault]
    with pytest.raises(ValueError, match=f"^sample p7/3[,:] {message}"):
        packed(sample(trace()), replace(make(), index=3))


@pytest.mark.parametrize("fault", VERSIONS)
def test_routes_of_other_weights_are_compared_with_where_they_are_not_replayed(fault: str) -> None:
    """A stock server retracts for want of memory, whatever is asked of it: modes r2 and off have no use for a refusal.
    Routes of other tokens are a fault in any mode."""
    batch = packed(PACKED[fault][0](), replayed=False)
    routing = batch.grid[0][0].routing
    assert isinstance(routing, RoutingTrace) and torch.equal(routing.experts, trace().experts)
    with pytest.raises(ValueError, match="shifted by 1"):
        packed(PACKED["shifted"][0](), replayed=False)


def test_what_is_whole_is_packed() -> None:
    """Of two versions too, each token's row under its own; and where nothing is under loss nothing need be told."""
    both = replace(trace(), versions=(VersionSpan(0, 0, 5), VersionSpan(1, 5, 11)))
    packed(sample(trace()), replace(sample(both, spans=(VersionSpan(0, 0, 2), VersionSpan(1, 2, 8))), index=4))
    silent = replace(sample(replace(trace(), versions=None)), loss_mask=torch.zeros(S, dtype=torch.bool), index=4)
    packed(sample(trace()), silent)

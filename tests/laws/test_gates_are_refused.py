"""Gate weights that are not those of their rows are refused like ids: they share their rows' seals.

Why it must hold: replayed gates (replay.gates) weigh the experts' outputs; those of another row or layer have the right
shape and sum, and train without a word. Not covered: gates that the engine captured wrongly before it sent them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from routing_replay.align import select_layers, take_rows
from routing_replay.checksums import row_checksums
from routing_replay.trace import RoutingTrace
from tests.support.refusals import refuses
from tests.support.sealed_traces import ALL, DRAWN, LAYERS, made, refused

CASES = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**31)


def gated(seed: int) -> tuple[Tensor, RoutingTrace]:
    tokens, trace = made(seed)
    return tokens, trace.with_gates(torch.rand(trace.experts.shape, generator=torch.Generator().manual_seed(seed)))


@given(seeds, st.permutations(range(11)), st.sampled_from([None, 0, 3]))
@CASES
def test_gates_of_another_row(seed: int, order: list[int], col: int | None) -> None:
    """Shifted, permuted: of all layers or of one, the ids where they were."""
    tokens, trace = gated(seed)
    trace.check_tokens(tokens, sample="p7/3")
    index = torch.tensor(order)
    moved = (index != torch.arange(11)).nonzero()[:, 0]
    assert trace.weights is not None
    gates = trace.weights.clone()
    columns = slice(None) if col is None else slice(col, col + 1)
    gates[:, columns] = trace.weights[index][:, columns]
    if len(moved):
        layer = ALL if col is None else LAYERS[col]
        wrong, first = replace(trace, weights=gates), int(moved[0])
        refused(wrong, tokens, len(moved), "overwritten", layer=layer, position=first, unrecorded=DRAWN)


def test_gates_that_changed_moved_with_their_ids_or_went_missing() -> None:
    tokens, trace = gated(3)
    assert trace.weights is not None
    bit = trace.weights.clone()
    bit.view(torch.int32)[6, 2, 1] ^= 1
    refused(replace(trace, weights=bit), tokens, 1, layer=3, position=6)
    late = torch.arange(11).roll(1)
    both = replace(trace, experts=trace.experts[late], weights=trace.weights[late])
    refused(both, tokens, "shifted", layer=ALL, position=0)
    ids = replace(trace, experts=trace.experts[late])
    refused(ids, tokens, 11, "overwritten", layer=ALL, position=0)
    refused(replace(trace, weights=None), tokens, 11, layer=ALL, position=0)
    rotated = replace(trace, experts=trace.experts.roll(1, 1), weights=trace.weights.roll(1, 1))
    refused(rotated, tokens, "rotated", layer=ALL, position=0)
    swapped = replace(trace, weights=trace.weights[:, [1, 0, 2, 3]])
    refused(swapped, tokens, 11, layer="1-2", position=0)
    with refuses(ValueError, "p7/3", 3, 6):
        RoutingTrace.check_all([trace, replace(trace, weights=bit)], [tokens] * 2, samples=["a/0", "p7/3"])
    RoutingTrace.check_all([trace, trace], [tokens] * 2, samples=["a/0", "p7/3"])


@given(seeds, st.integers(1, 10))
@CASES
def test_gates_come_in_pieces_too(seed: int, cut: int) -> None:
    """A part of the rows and layers holds the seals of its gates."""
    tokens, trace = gated(seed)
    assert trace.weights is not None
    pieces = []
    for a, b in ((0, cut), (cut, 11)):
        plain = RoutingTrace(experts=trace.experts[a:b], layers=LAYERS, num_experts=16)
        pieces.append(plain.with_checksums(tokens[a:b], start=a).with_gates(trace.weights[a:b], start=a))
    whole = pieces[0].append(pieces[1], cut)
    whole.check_tokens(tokens, sample="a/0")
    assert whole.layer_checksums is not None and trace.layer_checksums is not None and trace.checksums is not None
    assert torch.equal(whole.layer_checksums, trace.layer_checksums)
    again = replace(trace, checksums=None, layer_checksums=None).with_checksums(tokens[:-1])
    assert again.checksums is not None and torch.equal(again.checksums, trace.checksums)
    part, index = select_layers(take_rows(trace, torch.tensor([8, 2])), (2, 5)), torch.tensor([8, 2])
    assert part.checksums is not None
    own = row_checksums(tokens[index], part.experts, (2, 5), weights=part.weights, positions=index)
    assert torch.equal(part.checksums, own)

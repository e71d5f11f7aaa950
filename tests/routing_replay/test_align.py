"""Padding and slicing of traces: every row must end where its token does.

Letters: L MoE layers, K experts a token, E experts.
"""

from __future__ import annotations

import pytest
import torch

from routing_replay.align import padding_ids, place_rows, select_layers, sequence_slice, take_rows, zigzag_index
from routing_replay.trace import RoutingTrace
from tests.support.refusals import refuses

LAYERS, K, E = (1, 2, 4), 4, 16


def make(rows: int) -> RoutingTrace:
    g = torch.Generator().manual_seed(rows)
    ids = torch.rand(rows, len(LAYERS), E, generator=g).argsort(-1)[..., :K]
    return RoutingTrace(experts=ids.to(torch.uint8), layers=LAYERS, num_experts=E)


@pytest.mark.parametrize(("num_experts", "top_k"), [(16, 4), (10, 4), (384, 8), (3, 3)])
def test_padding_is_valid_and_spread(num_experts: int, top_k: int) -> None:
    """A router is given these ids: each must be an expert, none twice in a row, and no expert may get them all.

    Over E rows every expert is used K times, however K and E divide.
    """
    ids = padding_ids(num_experts, num_layers=2, top_k=top_k, num_experts=num_experts, first=5)
    trace = RoutingTrace(experts=ids, layers=(0, 1), num_experts=num_experts)
    trace.check()
    assert torch.unique(torch.bincount(ids[:, 0].long().flatten(), minlength=num_experts)).tolist() == [top_k]


def test_rows_go_to_their_places_and_padding_between() -> None:
    """A token keeps its own routes wherever it is fed; each padding row gets the next experts, so that the padding of
    many short packs does not all fall on expert 0."""
    t = make(5)
    placed = place_rows(t, torch.tensor([4, -1, 0, 1, -1, -1]))
    placed.check()
    assert torch.equal(placed.experts[[0, 2, 3]], t.experts[[4, 0, 1]]) and placed.experts.dtype is torch.uint8
    padding = placed.experts[[1, 4, 5]]
    assert torch.equal(padding, padding_ids(3, num_layers=3, top_k=K, num_experts=E, first=3))
    assert torch.equal(place_rows(t, torch.arange(5)).experts, t.experts)
    assert len(place_rows(make(0), torch.full((3,), -1))) == 3


def test_padding_cannot_repeat_and_rows_must_exist() -> None:
    """A row outside the trace would be another sample's."""
    with refuses(ValueError, 5, "0..5"):
        place_rows(make(5), torch.tensor([0, 5]))
    with refuses(ValueError, 4, 3):
        padding_ids(1, num_layers=1, top_k=4, num_experts=3)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sequence_parallel_slices_make_up_the_trace(size: int) -> None:
    """megatron-core gives rank r the r-th contiguous part of the tokens."""
    t = make(8)
    parts = [sequence_slice(t, r, size) for r in range(size)]
    assert torch.equal(torch.cat([p.experts for p in parts]), t.experts)
    assert {len(p) for p in parts} == {8 // size}


def test_slices_must_divide() -> None:
    """The last rank would have fewer rows than tokens."""
    with refuses(ValueError, 7, 2):
        sequence_slice(make(7), 0, 2)


def test_layers_go_by_their_global_number() -> None:
    """Layer 2 is the second column here as layer 0 has no router: an ordinal would pick another layer's experts."""
    t = make(6)
    stage = select_layers(t, [4, 2])
    assert stage.layers == (2, 4) and torch.equal(stage.experts, t.experts[:, 1:])
    assert select_layers(t, []).experts.shape == (6, 0, K)
    with refuses(ValueError, "[0, 3]"):
        select_layers(t, [0, 1, 3])


def test_rows_are_taken_in_order_and_only_from_within() -> None:
    """A negative index would wrap to the end of the pack."""
    t = make(6)
    assert torch.equal(take_rows(t, torch.tensor([5, 0, 0])).experts, t.experts[[5, 0, 0]])
    for bad in ([0, 6], [-1]):
        with refuses(ValueError, 6):
            take_rows(t, torch.tensor(bad))


def test_zigzag_by_hand() -> None:
    """Two sequences of 8 and 4 tokens over two ranks: chunks 0 and 3 to rank 0, 1 and 2 to rank 1, in each sequence."""
    cu = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert zigzag_index(cu, 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_index(cu, 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_zigzag_ranks_make_up_the_pack(size: int) -> None:
    """Each row exactly once, and the causal work (sum of positions) of all ranks equal."""
    cu = torch.tensor([0, 16, 24, 48], dtype=torch.int32)
    parts = [zigzag_index(cu, r, size) for r in range(size)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(48))
    assert len({int(p.sum()) for p in parts}) == 1


def test_zigzag_must_divide() -> None:
    """Else a rank's chunks would be of unequal length."""
    with refuses(ValueError, 6, 4):
        zigzag_index(torch.tensor([0, 6]), 0, 2)

"""What two sides' choices tell of recorded routes, on drawn ones. The law over real routers is
tests/laws/test_verify_names_faults.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from routing_replay.compare import BadRow, RouteComparison, agreement, bad_rows, compare_routes, overlap, replaced
from tests.support.refusals import refuses

NAMES = ("a/0", "a/1", "b/0")


def routes(seed: int = 0, *, layers: int = 4, experts: int = 32, top_k: int = 4) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.rand(n, layers, experts, generator=g).argsort(-1)[..., :top_k] for n in (11, 6, 17))


def flipped(given: tuple[Tensor, ...], share: float) -> tuple[Tensor, ...]:
    """In a share of all (row, layer) one expert is another, and the order of all is another."""
    g = torch.Generator().manual_seed(1)
    out = []
    for r in given:
        new = r.clone()
        for i, layer in (torch.rand(r.shape[:2], generator=g) < share).nonzero().tolist():
            others = [e for e in range(32) if e not in r[i, layer].tolist()]
            new[i, layer, 0] = others[int(torch.randint(len(others), (), generator=g))]
        out.append(new.flip(-1))
    return tuple(out)


def kinds(judged: RouteComparison) -> list[str]:
    return [fault.kind for fault in judged.faults]


def equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_near_ties_are_no_fault() -> None:
    """Up to a fifth of all choices with one expert of four exchanged: more than quantized weights cause."""
    for share in (0.0, 0.02, 0.2):
        assert compare_routes(flipped(routes(), share), routes(), NAMES).faults == ()
        assert bad_rows(flipped(routes(), share), routes()) == []


def test_nothing_is_said_of_a_router_that_sends_all_tokens_to_the_same_experts() -> None:
    own = tuple(torch.arange(4).expand(n, 4, 4) for n in (11, 6, 17))
    assert compare_routes(own, own, NAMES).faults == ()


def test_where_nothing_may_differ_a_near_tie_is_a_bad_row() -> None:
    own = routes()
    other = [r.clone() for r in own]
    other[2][13, 1, 0] = next(e for e in range(32) if e not in own[2][13, 1].tolist())
    assert compare_routes(other, own, NAMES).faults == ()
    assert bad_rows(other, own) == []
    assert bad_rows(other, own, exact=True) == [BadRow(sample=2, row=13, sure=True)]


def test_overlap_is_of_sets() -> None:
    a = torch.tensor([[[1, 2, 3, 4]]])
    assert overlap(a, a.flip(-1)).tolist() == [[1.0]]
    assert overlap(a, torch.tensor([[[4, 5, 6, 1]]])).tolist() == [[0.5]]
    assert agreement([a, a], [a, torch.tensor([[[1, 2, 3, 9]]])]).tolist() == [0.5]
    with refuses(ValueError, "[(1, 1, 4)]"):
        agreement([a], [a[:, :, :2]])


@pytest.mark.parametrize("d", [1, -1, 2, -3])
def test_moved_rows_are_moved_back(d: int) -> None:
    own = routes()
    judged = compare_routes([r.roll(d, 0) for r in flipped(own, 0.05)], own, NAMES)
    assert kinds(judged) == ["shifted"] and f"shifted by {d}:" in judged.faults[0].what
    assert float(agreement(judged.corrected, own).min()) > 0.8


def test_moved_rows_of_one_sample_are_moved_back() -> None:
    own = routes()
    moved = [own[0], own[1], own[2].roll(1, 0)]
    judged = compare_routes(moved, own, NAMES)
    assert [f.what for f in judged.faults] == ["rows of sample b/0 are shifted by 1: row i has the routes of token i-1"]
    assert equal(judged.corrected, own)


def test_layers_are_put_in_their_order() -> None:
    """All of them moved on, or two of them exchanged, with rows at their tokens or not."""
    own = routes()
    for order in ([1, 2, 3, 0], [0, 2, 1, 3]):
        judged = compare_routes([r[:, order] for r in own], own, NAMES)
        assert kinds(judged) == ["layers"] and equal(judged.corrected, own)
        judged = compare_routes([r[:, order].roll(1, 0) for r in own], own, NAMES)
        assert kinds(judged) == ["layers", "shifted"] and equal(judged.corrected, own)


def test_two_layers_of_many_are_found_among_near_ties() -> None:
    """They are a small part of all disagreement, and all of it in their places."""
    own = routes(layers=24)
    order = list(range(24))
    order[5], order[6] = 6, 5
    judged = compare_routes([r[:, order] for r in flipped(own, 0.2)], own, NAMES)
    assert [f.what for f in judged.faults] == [
        "of the MoE layers of all rows, counted from 0, layer 5 has the routes of layer 6, "
        "layer 6 has the routes of layer 5"
    ]


def test_a_layer_that_stands_twice_or_is_nobodys_is_named() -> None:
    own = routes()
    judged = compare_routes([r[:, [0, 1, 1, 3]] for r in own], own, NAMES)
    assert kinds(judged) == ["layers"] and "layer 2 has the routes of layer 1" in judged.faults[0].what
    assert equal(judged.corrected, own) and not judged.faults[0].known
    strange = [torch.cat([r[:, :3], (r[:, 3:] + 11) % 32], 1) for r in own]
    judged = compare_routes(strange, own, NAMES)
    assert kinds(judged) == ["strangers"] and "layers [3]" in judged.faults[0].what
    assert compare_routes(strange, own, NAMES, same_weights=False).faults == ()


def test_single_rows_are_found() -> None:
    own = routes()
    bad = [r.clone() for r in flipped(own, 0.05)]
    bad[2][13] = (own[2][13] + 7) % 32
    assert compare_routes(bad, own, NAMES).faults == ()
    found = bad_rows(bad, own)
    assert found == [BadRow(sample=2, row=13, sure=True)]
    corrected = replaced(bad, own, found)
    assert torch.equal(corrected[2][13], own[2][13]) and torch.equal(corrected[0], bad[0])
    judged = compare_routes([r.roll(1, 0) for r in bad], own, NAMES)
    assert kinds(judged) == ["shifted"] and bad_rows(judged.corrected, own) == found, "both at once"


def test_another_samples_routes_are_strangers() -> None:
    assert kinds(compare_routes(routes(5), routes(), NAMES)) == ["strangers"]


def test_a_tie_between_groups_is_no_bad_row() -> None:
    """Half of the experts of one layer, in one row: two groups were as good. In a model of one layer more than half
    look like a bad row, and the message marks this as unsure."""
    own = routes(layers=2)
    other = [r.clone() for r in own]
    strange = [e for e in range(32) if e not in own[0][3, 1].tolist()]
    other[0][3, 1, :2] = torch.tensor(strange[:2])
    assert bad_rows(other, own) == []
    other[0][3, 1] = torch.tensor(strange[:4])
    assert bad_rows(other, own) == [], "one layer alone"
    assert bad_rows([r[:, 1:] for r in other], [r[:, 1:] for r in own]) == [BadRow(sample=0, row=3, sure=False)]


def test_a_row_of_which_some_layers_agree_wholly_is_no_other_tokens() -> None:
    """Three of five layers share nothing, less than half of all experts are shared, and it is no bad row: another
    token's would not have two layers right. With a fourth it is one."""
    own = routes(layers=5)
    other = [r.clone() for r in own]
    other[2][4, :3] = (own[2][4, :3] + 7) % 32
    assert float(overlap(other[2], own[2])[4].mean()) < 0.5
    assert bad_rows(other, own) == []
    other[2][4, 3] = (own[2][4, 3] + 7) % 32
    assert bad_rows(other, own) == [BadRow(sample=2, row=4, sure=True)]

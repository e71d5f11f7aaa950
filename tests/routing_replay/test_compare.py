"""What two sides' choices tell of recorded routes, on drawn ones. The law over real routers is
tests/laws/test_verify_names_faults.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from routing_replay.compare import agreement, overlap, route_fault

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


def test_near_ties_are_no_fault() -> None:
    """Up to a fifth of all choices with one expert of four exchanged: more than quantized weights cause."""
    for share in (0.0, 0.02, 0.2):
        assert route_fault(flipped(routes(), share), routes(), NAMES) is None


def test_overlap_is_of_sets() -> None:
    a = torch.tensor([[[1, 2, 3, 4]]])
    assert overlap(a, a.flip(-1)).tolist() == [[1.0]]
    assert overlap(a, torch.tensor([[[4, 5, 6, 1]]])).tolist() == [[0.5]]
    assert agreement([a, a], [a, torch.tensor([[[1, 2, 3, 9]]])]).tolist() == [0.5]
    with pytest.raises(ValueError, match="cannot be compared"):
        agreement([a], [a[:, :, :2]])


@pytest.mark.parametrize("d", [1, -1, 2, -3])
def test_moved_rows_are_moved_back(d: int) -> None:
    own = routes()
    fault = route_fault([r.roll(d, 0) for r in flipped(own, 0.05)], own, NAMES)
    assert fault is not None and fault.kind == "shifted" and f"shifted by {d}:" in fault.what
    assert float(agreement(fault.corrected, own).min()) > 0.8


def test_layers_are_put_in_their_order() -> None:
    own = routes()
    for order in ([1, 2, 3, 0], [0, 2, 1, 3]):
        fault = route_fault([r[:, order] for r in own], own, NAMES)
        assert fault is not None and fault.kind == "layers"
        assert all(torch.equal(a, b) for a, b in zip(fault.corrected, own, strict=True))


def test_single_rows_are_named() -> None:
    own = routes()
    bad = [r.clone() for r in flipped(own, 0.05)]
    bad[2][13] = (own[2][13] + 7) % 32
    fault = route_fault(bad, own, NAMES)
    assert fault is not None and fault.kind == "rows"
    assert fault.what == "1 of 34 rows are not their tokens': sample b/0, position 13"
    assert torch.equal(fault.corrected[2][13], own[2][13]) and torch.equal(fault.corrected[0], bad[0])


def test_another_samples_routes_are_strangers() -> None:
    fault = route_fault(routes(5), routes(), NAMES)
    assert fault is not None and fault.kind == "strangers"


def test_a_tie_between_groups_is_no_bad_row() -> None:
    """Half of the experts of one layer, in one row: two groups were as good."""
    own = routes(layers=2)
    other = [r.clone() for r in own]
    other[0][3, 1, :2] = torch.tensor([e for e in range(32) if e not in own[0][3, 1].tolist()][:2])
    assert route_fault(other, own, NAMES) is None
    other[0][3, 1] = torch.tensor([e for e in range(32) if e not in own[0][3, 1].tolist()][:4])
    assert route_fault(other, own, NAMES) is None, "one layer alone"

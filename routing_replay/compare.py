"""Faults of recorded routes, found by comparison with the routes that another side chose for the same tokens.

Checksums prove that rows are those that an engine sent; they cannot prove that it sent the right ones. The choices of
another side can: routers of the same weights agree except for near-ties, while rows of other tokens or layers agree no
more than unrelated rows do.

Letters: rows of one sample, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_SHIFTS = (0, 1, -1, 2, -2, 3, -3)
_HALF, _MOST = 0.5, 0.75  # of a row's experts, and of its layers
_SURE = 3  # layers
_ROWS = 1024  # rows of all samples that layers are compared on: L^2 comparisons each
_ALONE = 6  # least rows of a sample that is examined separately


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteFault:
    """One fault of the recorded routes."""

    kind: Literal["shifted", "layers", "strangers"]
    what: str
    known: bool = True  # whether nearly all of the correct routes can be recovered


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouteComparison:
    """The faults of the recorded routes, and the routes with these faults corrected."""

    faults: tuple[RouteFault, ...]
    corrected: tuple[Tensor, ...]  # [rows, L, K] of each sample; the other side's where they cannot be recovered


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """[rows, L] fp32: the share of the K experts of `a` [rows, L, K] that `b` has too, in any order."""
    return (a.long()[..., :, None] == b.long()[..., None, :]).any(-1).float().mean(-1)


def agreement(recorded: Sequence[Tensor], own: Sequence[Tensor]) -> Tensor:
    """[L] fp64: the share of rows in each layer where both sides chose the same set. Raises ValueError when the shapes
    differ or there is no row."""
    if [tuple(r.shape) for r in recorded] != [tuple(o.shape) for o in own] or not sum(map(len, recorded)):
        raise ValueError(f"routes {[tuple(r.shape) for r in recorded]} cannot be compared with those of other shapes")
    return (torch.cat([overlap(r, o) for r, o in zip(recorded, own, strict=True)]) == 1).double().mean(0)


def compare_routes(
    recorded: Sequence[Tensor], own: Sequence[Tensor], names: Sequence[str], *, same_weights: bool = True
) -> RouteComparison:
    """Compares the routes [rows, L, K] of each sample from two sides. There is no fault where they differ no more than
    near-ties do, or in single rows (`bad_rows`). Without `same_weights` only moved rows and layers are searched.

    Rows moved by up to three positions and layers that hold another layer's routes, in all samples or in one, are
    reported where undoing the move removes more than half of the disagreement; then layers that share no more experts
    with the other side than rows of other tokens do.
    """
    faults, current = _rearranged(recorded, own, "all rows")
    far = float(1 - _unrelated(own).mean()) / 2
    for i, name in enumerate(names):
        if len(own[i]) >= _ALONE and float(1 - overlap(current[i], own[i]).mean()) > far:
            moved, (undone,) = _rearranged(current[i : i + 1], own[i : i + 1], f"rows of sample {name}")
            faults, current = faults + moved, [*current[:i], undone, *current[i + 1 :]]
    if same_weights and (found := _strange_layers(current, own)) is not None:
        faults, current = [*faults, found[0]], found[1]
    return RouteComparison(faults=tuple(faults), corrected=tuple(current))


def _unrelated(own: Sequence[Tensor]) -> Tensor:
    """[L]: the overlap of rows of neighbouring tokens."""
    o = torch.cat(list(own))
    return torch.stack([overlap(o, o.roll(d, 0)).mean(0) for d in _SHIFTS[1:]]).median(0).values


# ---- rows and layers in other places


def _rearranged(
    recorded: Sequence[Tensor], own: Sequence[Tensor], subject: str
) -> tuple[list[RouteFault], list[Tensor]]:
    """Finds and undoes moved rows and layers, both at once. subject: the rows' name in messages."""
    found = []
    for d in _SHIFTS:
        r, o = _moved(recorded, own, d)
        if sum(map(len, r)):
            holds, left = _layers(torch.cat(r), torch.cat(o))
            found.append((left, d, holds))
    left, d, holds = min(found, key=lambda f: f[0])
    if not left < found[0][0] / 2:
        left, d, holds = found[0]
    faults, undone = [], list(recorded)
    other = [(p, q) for p, q in enumerate(holds.tolist()) if p != q]
    if other:
        shown = ", ".join(f"layer {p} has the routes of layer {q}" for p, q in other[:4])
        what = f"of the MoE layers of {subject}, counted from 0, {shown}{', ...' if len(other) > 4 else ''}"
        faults.append(RouteFault(kind="layers", what=what, known=len(set(holds.tolist())) == len(holds)))
        undone = [_in_order(u, o, holds) for u, o in zip(undone, own, strict=True)]
    if d:
        what = f"{subject} are shifted by {d}: row i has the routes of token i{-d:+d}"
        faults.append(RouteFault(kind="shifted", what=what))
        undone = _unshifted(undone, own, d)
    return faults, undone


def _layers(r: Tensor, o: Tensor) -> tuple[Tensor, float]:
    """([L]: the layer whose routes each place holds, the disagreement that remains). r, o: [rows, L, K]. A place is
    assigned another layer where that more than halves its disagreement."""
    every = -(-len(r) // _ROWS)
    r, o = r[::every], o[::every]
    shared = torch.stack([overlap(r, o[:, [q]].expand_as(o)).mean(0) for q in range(r.shape[1])])  # [q, p]
    best = shared.max(0)
    place = torch.arange(r.shape[1])
    moved = (1 - best.values) < (1 - shared.diagonal()) / 2
    holds = torch.where(moved, best.indices, place)
    return holds, float(1 - shared[holds, place].mean())


def _moved(recorded: Sequence[Tensor], own: Sequence[Tensor], d: int) -> tuple[list[Tensor], list[Tensor]]:
    """Pairs recorded row i + d with own row i."""
    pairs = []
    for r, o in zip(recorded, own, strict=True):
        n = max(len(r) - abs(d), 0)
        pairs.append((r[len(r) - n :], o[:n]) if d > 0 else (r[:n], o[len(o) - n :]))
    return [r for r, _ in pairs], [o for _, o in pairs]


def _unshifted(recorded: Sequence[Tensor], own: Sequence[Tensor], d: int) -> list[Tensor]:
    """Rows moved back to their tokens; the other side's rows where none is left."""
    out = []
    for r, o in zip(recorded, own, strict=True):
        fixed = o.clone().to(r.dtype)
        if len(r) > abs(d):
            if d > 0:
                fixed[:-d] = r[d:]
            else:
                fixed[-d:] = r[:d]
        out.append(fixed)
    return out


def _in_order(recorded: Tensor, own: Tensor, holds: Tensor) -> Tensor:
    """Layers moved back to their places; the other side's where no place holds them."""
    fixed = own.clone().to(recorded.dtype)
    fixed[:, holds] = recorded
    return fixed


# ---- rows and layers that agree with no other


def _strange_layers(recorded: Sequence[Tensor], own: Sequence[Tensor]) -> tuple[RouteFault, list[Tensor]] | None:
    """Layers that share no more experts with the other side than neighbouring tokens do."""
    shared = torch.cat([overlap(r, o) for r, o in zip(recorded, own, strict=True)]).median(0).values
    bad = shared < (1 + _unrelated(own)) / 2
    if not bool(bad.any()):
        return None
    layers = "all MoE layers" if bool(bad.all()) else f"the MoE layers {bad.nonzero()[:, 0].tolist()}, counted from 0,"
    what = f"in {layers} a row shares {float(shared[bad].mean()):.0%} of its experts with the other side's"
    fixed = [torch.where(bad[:, None], o.to(r.dtype), r) for r, o in zip(recorded, own, strict=True)]
    return RouteFault(kind="strangers", what=what, known=False), fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    sample: int  # its index
    row: int
    sure: bool  # at least three layers share half of their experts or fewer; else near-ties may explain the row


def bad_rows(recorded: Sequence[Tensor], own: Sequence[Tensor], *, exact: bool = False) -> list[BadRow]:
    """Single rows, in order, where most layers differ and less than half of the experts are shared; with `exact` all
    rows that differ. In one layer alone a near-tie between groups of experts may exchange as many."""
    threshold = min(float(1 + _unrelated(own).mean()) / 2, _HALF)
    out = []
    for i, (r, o) in enumerate(zip(recorded, own, strict=True)):
        shared = overlap(r, o)
        differ = (shared < 1).float().mean(1)
        wrong = differ > 0 if exact else (shared.mean(1) < threshold) & (differ >= _MOST)
        sure = ((shared <= _HALF).sum(1) >= _SURE) | exact
        out += [BadRow(sample=i, row=p, sure=bool(sure[p])) for p in wrong.nonzero()[:, 0].tolist()]
    return out


def replaced(recorded: Sequence[Tensor], own: Sequence[Tensor], bad: Sequence[BadRow]) -> tuple[Tensor, ...]:
    """`recorded` with the other side's routes in the rows `bad`."""
    out = [r.clone() for r in recorded]
    for b in bad:
        out[b.sample][b.row] = own[b.sample][b.row].to(out[b.sample].dtype)
    return tuple(out)

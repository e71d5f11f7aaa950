"""What is wrong with recorded routes, judged by those that another side chose for the same tokens.

Seals tell that rows are those that an engine sent; they cannot tell that it sent the right ones. Another side's own
choice can: routers of the same weights agree but for near-ties, while rows of other tokens and layers agree no more
than strangers do.

Letters: rows of one sample, L MoE layers, K experts a token.
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
_ROWS = 1024  # of all samples, that layers are told apart by: L^2 comparisons each
_ALONE = 6  # rows of a sample that is looked at by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteFault:
    """One thing that happened to the recorded routes."""

    kind: Literal["shifted", "layers", "strangers"]
    what: str
    known: bool = True  # whether nearly all of what they would be without it is


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """What happened to the recorded routes, and what they would be without it."""

    faults: tuple[RouteFault, ...]
    corrected: tuple[Tensor, ...]  # [rows, L, K] of each sample; the other side's own where nothing is known


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """[rows, L] fp32: the share of the K experts of `a` [rows, L, K] that `b` has too, in whatever order."""
    return (a.long()[..., :, None] == b.long()[..., None, :]).any(-1).float().mean(-1)


def agreement(recorded: Sequence[Tensor], own: Sequence[Tensor]) -> Tensor:
    """[L] fp64: of each layer, the share of rows where both sides chose the same set. Raises ValueError for shapes that
    differ, or no row."""
    if [tuple(r.shape) for r in recorded] != [tuple(o.shape) for o in own] or not sum(map(len, recorded)):
        raise ValueError(f"routes {[tuple(r.shape) for r in recorded]} cannot be compared with those of other shapes")
    return (torch.cat([overlap(r, o) for r, o in zip(recorded, own, strict=True)]) == 1).double().mean(0)


def judge_routes(
    recorded: Sequence[Tensor], own: Sequence[Tensor], names: Sequence[str], *, same_weights: bool = True
) -> Judged:
    """recorded, own: [rows, L, K] of each sample, by any two sides. No fault: they differ no more than near-ties do, or
    in single rows (`bad_rows`). Without `same_weights` only rows and layers in other places are looked for.

    Rows moved by up to three positions and layers that hold another's routes, of all samples or of one, are found where
    undoing that takes away more than half of the disagreement; then layers whose experts are no more the other side's
    than other tokens' are.
    """
    faults, current = _rearranged(recorded, own, "all rows")
    far = float(1 - _strangers(own).mean()) / 2
    for i, name in enumerate(names):
        if len(own[i]) >= _ALONE and float(1 - overlap(current[i], own[i]).mean()) > far:
            moved, (undone,) = _rearranged(current[i : i + 1], own[i : i + 1], f"rows of sample {name}")
            faults, current = faults + moved, [*current[:i], undone, *current[i + 1 :]]
    if same_weights and (found := _strange_layers(current, own)) is not None:
        faults, current = [*faults, found[0]], found[1]
    return Judged(faults=tuple(faults), corrected=tuple(current))


Found = tuple[RouteFault, list[Tensor]]


def _strangers(own: Sequence[Tensor]) -> Tensor:
    """[L]: what rows of neighbouring tokens share."""
    o = torch.cat(list(own))
    return torch.stack([overlap(o, o.roll(d, 0)).mean(0) for d in _SHIFTS[1:]]).median(0).values


# ---- rows and layers in other places


def _rearranged(recorded: Sequence[Tensor], own: Sequence[Tensor], whose: str) -> tuple[list[RouteFault], list[Tensor]]:
    """Moved rows and layers, both at once."""
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
        shown = ", ".join(f"layer {p} holds those of layer {q}" for p, q in other[:4])
        what = f"of the MoE layers of {whose}, counted from 0, {shown}{', ...' if len(other) > 4 else ''}"
        faults.append(RouteFault(kind="layers", what=what, known=len(set(holds.tolist())) == len(holds)))
        undone = [_in_order(u, o, holds) for u, o in zip(undone, own, strict=True)]
    if d:
        what = f"{whose} are shifted by {d}: row i holds those of token i{-d:+d}"
        faults.append(RouteFault(kind="shifted", what=what))
        undone = _unshifted(undone, own, d)
    return faults, undone


def _layers(r: Tensor, o: Tensor) -> tuple[Tensor, float]:
    """([L]: of which layer the routes are that each place holds, the disagreement that this leaves). r, o: [rows, L,
    K]. A place holds another's where that more than halves what disagrees there."""
    every = -(-len(r) // _ROWS)
    r, o = r[::every], o[::every]
    shared = torch.stack([overlap(r, o[:, [q]].expand_as(o)).mean(0) for q in range(r.shape[1])])  # [q, p]
    best = shared.max(0)
    place = torch.arange(r.shape[1])
    moved = (1 - best.values) < (1 - shared.diagonal()) / 2
    holds = torch.where(moved, best.indices, place)
    return holds, float(1 - shared[holds, place].mean())


def _moved(recorded: Sequence[Tensor], own: Sequence[Tensor], d: int) -> tuple[list[Tensor], list[Tensor]]:
    """Recorded row i + d beside own row i."""
    pairs = []
    for r, o in zip(recorded, own, strict=True):
        n = max(len(r) - abs(d), 0)
        pairs.append((r[len(r) - n :], o[:n]) if d > 0 else (r[:n], o[len(o) - n :]))
    return [r for r, _ in pairs], [o for _, o in pairs]


def _unshifted(recorded: Sequence[Tensor], own: Sequence[Tensor], d: int) -> list[Tensor]:
    """Rows at their tokens again; the other side's where that leaves none."""
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
    """Layers at their places again; the other side's where none holds them."""
    fixed = own.clone().to(recorded.dtype)
    fixed[:, holds] = recorded
    return fixed


# ---- rows and layers that are nobody's


def _strange_layers(recorded: Sequence[Tensor], own: Sequence[Tensor]) -> Found | None:
    """Layers whose experts are no more the other side's than a neighbour's are."""
    shared = torch.cat([overlap(r, o) for r, o in zip(recorded, own, strict=True)]).median(0).values
    bad = shared < (1 + _strangers(own)) / 2
    if not bool(bad.any()):
        return None
    of = "all MoE layers" if bool(bad.all()) else f"the MoE layers {bad.nonzero()[:, 0].tolist()}, counted from 0,"
    what = f"in {of} a row shares {float(shared[bad].mean()):.0%} of its experts with the other side's"
    fixed = [torch.where(bad[:, None], o.to(r.dtype), r) for r, o in zip(recorded, own, strict=True)]
    return RouteFault(kind="strangers", what=what, known=False), fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    sample: int  # its index
    row: int
    sure: bool  # three layers at least share half of their experts or fewer; else near-ties can do the same


def bad_rows(recorded: Sequence[Tensor], own: Sequence[Tensor], *, exact: bool = False) -> list[BadRow]:
    """Single rows, in order, where most layers differ and not even half of the experts are shared; with `exact` those
    that differ at all. A near-tie between groups of experts may exchange as many in one layer."""
    line = min(float(1 + _strangers(own).mean()) / 2, _HALF)
    out = []
    for i, (r, o) in enumerate(zip(recorded, own, strict=True)):
        shared = overlap(r, o)
        differ = (shared < 1).float().mean(1)
        wrong = differ > 0 if exact else (shared.mean(1) < line) & (differ >= _MOST)
        sure = ((shared <= _HALF).sum(1) >= _SURE) | exact
        out += [BadRow(sample=i, row=p, sure=bool(sure[p])) for p in wrong.nonzero()[:, 0].tolist()]
    return out


def replaced(recorded: Sequence[Tensor], own: Sequence[Tensor], bad: Sequence[BadRow]) -> tuple[Tensor, ...]:
    """With the other side's in these rows."""
    out = [r.clone() for r in recorded]
    for b in bad:
        out[b.sample][b.row] = own[b.sample][b.row].to(out[b.sample].dtype)
    return tuple(out)

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

_SHIFTS = (1, -1, 2, -2, 3, -3)
_HALF, _MOST = 0.5, 0.75  # of a row's experts, and of its layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouteFault:
    """What happened to the recorded routes, and what they would be without it."""

    kind: Literal["shifted", "layers", "rows", "strangers"]
    what: str
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


def route_fault(recorded: Sequence[Tensor], own: Sequence[Tensor], names: Sequence[str]) -> RouteFault | None:
    """recorded, own: [rows, L, K] of each sample, by any two sides of the same weights. None: they differ no more than
    near-ties do.

    Rows moved by up to three positions and layers in another order are found where that undoes more than half of all
    disagreement; single rows where most layers differ and not even half of the experts are shared, no more than other
    tokens' rows do share. A near-tie between groups of experts may exchange as many in one layer: that alone is no bad
    row where there are other layers.
    """
    level = _disagreement(recorded, own)
    for d in _SHIFTS:
        if _disagreement(*_moved(recorded, own, d)) < level / 2:
            what = f"all rows are shifted by {d}: row i holds those of token i{-d:+d}"
            return RouteFault(kind="shifted", what=what, corrected=_unshifted(recorded, own, d))
    if (order := _layer_order(recorded, own)) is not None:
        undone = tuple(r[:, order] for r in recorded)
        if _disagreement(undone, own) < level / 2:
            shown = ", ".join(f"layer {i} stands at {j}" for i, j in enumerate(order.tolist()) if i != j)
            return RouteFault(
                kind="layers", what=f"layers are in another order, of the MoE layers: {shown}", corrected=undone
            )
    return _bad_rows(recorded, own, names)


def _disagreement(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    parts = [overlap(x, y) for x, y in zip(a, b, strict=True) if len(x)]
    return 1.0 - float(torch.cat(parts).mean()) if parts else 1.0


def _moved(recorded: Sequence[Tensor], own: Sequence[Tensor], d: int) -> tuple[list[Tensor], list[Tensor]]:
    """Recorded row i + d beside own row i."""
    pairs = []
    for r, o in zip(recorded, own, strict=True):
        n = max(len(r) - abs(d), 0)
        pairs.append((r[len(r) - n :], o[:n]) if d > 0 else (r[:n], o[len(o) - n :]))
    return [r for r, _ in pairs], [o for _, o in pairs]


def _unshifted(recorded: Sequence[Tensor], own: Sequence[Tensor], d: int) -> tuple[Tensor, ...]:
    out = []
    for r, o in zip(recorded, own, strict=True):
        fixed = o.clone().to(r.dtype)
        if len(r) > abs(d):
            if d > 0:
                fixed[:-d] = r[d:]
            else:
                fixed[-d:] = r[:d]
        out.append(fixed)
    return tuple(out)


def _layer_order(recorded: Sequence[Tensor], own: Sequence[Tensor]) -> Tensor | None:
    """[L]: at which place each layer's routes were recorded; None where that is no other order than it should be."""
    r, o = torch.cat(list(recorded)), torch.cat(list(own))
    layers = r.shape[1]
    found = torch.stack([overlap(r, o[:, [i]].expand_as(o)).mean(0) for i in range(layers)]).argmax(1)
    own_order = torch.arange(layers)
    return None if len(set(found.tolist())) < layers or torch.equal(found, own_order) else found


def _bad_rows(recorded: Sequence[Tensor], own: Sequence[Tensor], names: Sequence[str]) -> RouteFault | None:
    of_rows = [overlap(r, o).mean(1) for r, o in zip(recorded, own, strict=True)]
    every = torch.cat(of_rows)
    o = torch.cat(list(own))
    strangers = torch.stack([overlap(o, o.roll(d, 0)).mean() for d in _SHIFTS]).median()
    typical = every.median()
    if typical <= (1 + strangers) / 2:
        what = f"a row shares {float(typical):.0%} of its experts with the other side's"
        return RouteFault(kind="strangers", what=what, corrected=tuple(own))
    line = min(float(strangers + (typical - strangers) / 4), _HALF)
    differ = [(overlap(r, o) < 1).float().mean(1) >= _MOST for r, o in zip(recorded, own, strict=True)]
    bad = [
        (i, int(p))
        for i, (rows, most) in enumerate(zip(of_rows, differ, strict=True))
        for p in ((rows <= line) & most).nonzero()[:, 0]
    ]
    if not bad:
        return None
    corrected = [r.clone() for r in recorded]
    for i, p in bad:
        corrected[i][p] = own[i][p].to(corrected[i].dtype)
    shown = ", ".join(f"sample {names[i]}, position {p}" for i, p in bad[:3])
    what = f"{len(bad)} of {len(every)} rows are not their tokens': {shown}{', ...' if len(bad) > 3 else ''}"
    return RouteFault(kind="rows", what=what, corrected=tuple(corrected))

"""What happened to routes that are not those that were sealed, in words.

Only asked once a trace has been refused. Two things can have been moved: rows with their seals (then a seal belongs to
another position's token) or rows alone (then the ids of a row give another position's seal). The difference of a row's
seal and what its ids contribute is what its token must contribute, and the other way round, so both can be looked up
among the sample's own rows; what is found in neither way is not of this sample.

Letters: rows, L MoE layers, K experts a token. Routes: ids, and gate weights where there are any.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from routing_replay.seals import expert_part, gate_part, layer_numbers, layer_sums, route_part, token_part

_ALIKE = 8  # rows like the first that are tried as the place where all were shifted from


class Finding(NamedTuple):
    """What is wrong with the routes of `layers`."""

    layers: tuple[int, ...]
    what: str


def what_happened(
    tokens: Tensor,
    experts: Tensor,
    weights: Tensor | None,
    layers: tuple[int, ...],
    seals: Tensor,
    layer_seals: Tensor | None,
) -> Finding:
    """tokens [rows] as fed, experts and weights [rows, L, K], seals [rows] of which at least one is wrong, layer_seals
    [L]."""
    of_token = token_part(tokens, torch.arange(len(tokens)))
    of_routes = route_part(experts, weights, layers)
    sums = layer_sums(experts, weights)
    broken = _broken(sums, layers, layer_seals)
    if not broken:
        return Finding(layers, "the routes are whole, but of other tokens: another sample's")
    if words := _moved(seals - of_routes, of_token) or _moved(of_routes, seals - of_token):
        return Finding(layers, words)
    if layer_seals is not None and (
        words := _exchanged(sums, layers, layer_seals) or _renumbered(sums, layers, layer_seals)
    ):
        return Finding(broken, words)
    for said, own in _parts(experts, weights, layers, broken):
        if words := _moved(own, seals - of_token - of_routes + own):
            return Finding(broken, f"{said}, {words}")
    wrong = int((of_token + of_routes != seals).sum())
    what = "ids" if weights is None else "ids or gate weights"
    if len(broken) == len(layers) > 1 and wrong > 1:
        return Finding(broken, f"{wrong} rows are not the routes that were sealed: another sample's, or overwritten")
    return Finding(broken, f"{wrong} rows hold other {what} than were sealed: overwritten")


def _parts(
    experts: Tensor, weights: Tensor | None, layers: tuple[int, ...], broken: tuple[int, ...]
) -> list[tuple[str, Tensor]]:
    """What may have moved without the rest, in words, and its part [rows] of the seals."""
    found = []
    col = [layers.index(layer) for layer in broken]
    if len(broken) == 1:
        found.append(
            ("in this layer alone", route_part(experts[:, col], None if weights is None else weights[:, col], broken))
        )
    if weights is not None:
        found.append(("of the gate weights alone", gate_part(weights[:, col], broken)))
        found.append(("of the ids without their gate weights", expert_part(experts[:, col], broken)))
    return found


def _broken(sums: Tensor, layers: tuple[int, ...], layer_seals: Tensor | None) -> tuple[int, ...]:
    """Layers whose rows are not those that were sealed; all of them where the sample's layers have no seals."""
    if layer_seals is None:
        return layers
    wrong = layer_numbers(layers) + sums != layer_seals
    return tuple(layer for layer, bad in zip(layers, wrong.tolist(), strict=True) if bad)


def _exchanged(sums: Tensor, layers: tuple[int, ...], layer_seals: Tensor) -> str:
    """Which layers hold which others' routes; empty unless each broken layer holds a sealed one's."""
    held, sealed = sums.tolist(), (layer_seals - layer_numbers(layers)).tolist()
    found = {layers[i]: layers[sealed.index(h)] for i, h in enumerate(held) if h != sealed[i] and h in sealed}
    if len(found) < sum(h != s for h, s in zip(held, sealed, strict=True)):
        return ""
    shown = ", ".join(f"layer {a} holds the routes of layer {b}" for a, b in list(found.items())[:3])
    kind = "swapped" if len(found) == 2 and all(found.get(b) == a for a, b in found.items()) else "rotated or permuted"
    return f"layers are {kind}: {shown}{', ...' if len(found) > 3 else ''}"


def _renumbered(sums: Tensor, layers: tuple[int, ...], layer_seals: Tensor) -> str:
    """Which layers were sealed under other numbers; empty unless each broken one was."""
    known = layer_numbers(range(max(layers) + 64)).tolist()
    numbers = [known.index(n) if n in known else -1 for n in (layer_seals - sums).tolist()]
    found = [(a, b) for a, b in zip(layers, numbers, strict=True) if a != b]
    if any(b < 0 for _, b in found):
        return ""
    shown = ", ".join(f"layer {a} was sealed as layer {b}" for a, b in found[:3])
    return f"layers go by other numbers: {shown}{', ...' if len(found) > 3 else ''}"


def _lookup(wanted: Tensor, among: Tensor) -> Tensor:
    """[n] int64: where each of `wanted` is in `among`, the first place; -1 where it is not."""
    ordered, order = among.sort(stable=True)
    at = torch.searchsorted(ordered, wanted).clamp(max=len(among) - 1)
    return torch.where(ordered[at] == wanted, order[at], -1)


def _moved(now: Tensor, was: Tensor) -> str:
    """What happened to rows whose checksums [rows] were `was` and are `now`; empty when it was no moving of rows."""
    rows, bad = len(now), (now != was).nonzero()[:, 0]
    for d in (1, -1, 2, -2, 3, -3):  # asked first: rows that are alike have several places they may come from
        if rows > 2 * abs(d) and torch.equal(now, was.roll(-d)):
            return f"all rows are shifted by {-d}"
    for p in (was == now[0]).nonzero()[:_ALIKE, 0].tolist():
        if p and torch.equal(now, was.roll(-p)):
            return f"all rows are shifted by {rows - p}"
    source = _lookup(now[bad], was)
    if bool((source < 0).any()):
        return ""
    where = torch.arange(rows)
    where[bad] = source
    steps = set((source - bad).tolist())
    if len(steps) == 1 and len(bad) > 1 and int(bad[-1] - bad[0]) == len(bad) - 1:
        return f"rows from there on are shifted by {-steps.pop()}"
    if len(set(where.tolist())) == rows:
        turn = set((torch.arange(rows) - where).remainder(rows).tolist())
        return f"all rows are shifted by {turn.pop()}" if len(turn) == 1 else f"{len(bad)} rows are permuted"
    return f"the row of position {int(source[0])} is there a second time: duplicated"

"""Describes in a sentence how routes that do not match their checksums were changed: rows or layers that moved, another
sample's routes, overwritten ones.

`diagnose` is called only after a trace has failed to verify. Rows may have moved with their checksums (then a checksum
belongs to the token of another position) or without (then the ids of a row match the checksum of another position). The
checksum of a row less the term of its ids is the term of its token, and the other way round, so both are looked up
among the rows of the sample.

Letters: rows, L MoE layers, K experts per token. Routes: ids, and gate weights where there are any.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from routing_replay.checksums import layer_sums, layer_terms, routes_term, token_term

_ALIKE = 8  # rows equal to the first that are tried as the origin of a shift


class Finding(NamedTuple):
    """The fault of the routes of `layers`, as a sentence."""

    layers: tuple[int, ...]
    what: str


def diagnose(
    tokens: Tensor,
    experts: Tensor,
    weights: Tensor | None,
    layers: tuple[int, ...],
    checksums: Tensor,
    layer_checksums: Tensor | None,
) -> Finding:
    """The fault of one sample's routes. tokens [rows] as fed, experts and weights [rows, L, K], checksums [rows] of
    which at least one does not match, layer_checksums [L]."""
    of_token = token_term(tokens, torch.arange(len(tokens)))
    of_routes = routes_term(experts, weights, layers)
    sums = layer_sums(experts, weights)
    broken = _broken(sums, layers, layer_checksums)
    if not broken:
        return Finding(layers, "the routes are complete, but belong to other tokens: another sample's")
    if moved := _moved(checksums - of_routes, of_token) or _moved(of_routes, checksums - of_token):
        return Finding(layers, moved)
    if layer_checksums is not None and (exchanged := _exchanged(sums, layers, layer_checksums)):
        return Finding(broken, exchanged)
    wrong = int((of_token + of_routes != checksums).sum())
    what = "ids" if weights is None else "ids or gate weights"
    if len(broken) == len(layers) > 1 and wrong > 1:
        return Finding(broken, f"{wrong} rows do not match their checksums: another sample's, or overwritten")
    return Finding(broken, f"{wrong} rows hold {what} that do not match their checksums: overwritten")


def _broken(sums: Tensor, layers: tuple[int, ...], layer_checksums: Tensor | None) -> tuple[int, ...]:
    """Layers whose rows do not match the layer's checksum; all layers where the sample has no layer checksums."""
    if layer_checksums is None:
        return layers
    wrong = layer_terms(layers) + sums != layer_checksums
    return tuple(layer for layer, bad in zip(layers, wrong.tolist(), strict=True) if bad)


def _exchanged(sums: Tensor, layers: tuple[int, ...], layer_checksums: Tensor) -> str:
    """Which layers hold the routes of which others; empty unless each broken layer holds those of a known one."""
    held, sent = sums.tolist(), (layer_checksums - layer_terms(layers)).tolist()
    found = {layers[i]: layers[sent.index(h)] for i, h in enumerate(held) if h != sent[i] and h in sent}
    if len(found) < sum(h != s for h, s in zip(held, sent, strict=True)):
        return ""
    shown = ", ".join(f"layer {a} holds the routes of layer {b}" for a, b in list(found.items())[:3])
    kind = "swapped" if len(found) == 2 and all(found.get(b) == a for a, b in found.items()) else "rotated or permuted"
    return f"layers are {kind}: {shown}{', ...' if len(found) > 3 else ''}"


def _lookup(wanted: Tensor, among: Tensor) -> Tensor:
    """[n] int64: the first index of each of `wanted` in `among`; -1 where it is absent."""
    ordered, order = among.sort(stable=True)
    at = torch.searchsorted(ordered, wanted).clamp(max=len(among) - 1)
    return torch.where(ordered[at] == wanted, order[at], -1)


def _moved(now: Tensor, was: Tensor) -> str:
    """How rows moved whose terms [rows] were `was` and are `now`; empty when they are no rearrangement."""
    rows, bad = len(now), (now != was).nonzero()[:, 0]
    alike = (was == now[0]).nonzero()[:_ALIKE, 0].tolist()
    for by in (1, -1, 2, -2, 3, -3, *(rows - p for p in alike)):  # checked first: equal rows may come from several
        if torch.equal(now, was.roll(by)):
            return f"all rows are shifted by {by}"
    source = _lookup(now[bad], was)
    if bool((source < 0).any()):
        return ""
    steps = set((source - bad).tolist())
    if len(steps) == 1 and len(bad) > 1 and int(bad[-1] - bad[0]) == len(bad) - 1:
        return f"rows from there on are shifted by {-steps.pop()}"
    if len(set(source.tolist())) == len(bad) and set(source.tolist()) == set(bad.tolist()):
        return f"{len(bad)} rows are permuted"
    return f"the row of position {int(source[0])} is duplicated"

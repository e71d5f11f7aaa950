"""Checksums of weights that are divided over ranks: those of the whole tensors, as one rank reports them.

The slices of a tensor are brought together on one rank, one tensor at a time; the ranks take turns. Of what several
ranks hold, each hashes its copy, and copies that differ are an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rollout.embedded.model.weights import WeightStore
from rollout.embedded.ranks.gloo import GlooExchange
from rollout.wire.checksum import tensor_checksum


def rank_checksums(store: WeightStore, exchange: GlooExchange) -> dict[str, str]:
    """Stored name -> checksum of each tensor that this rank holds completely, or brought together. Called by all ranks
    at the same time. Rows that differ are left to `merged`: an exception here would leave the others waiting."""
    slices, out = store.slices, dict[str, str]()
    for i, name in enumerate(store.whole_shapes):
        holders = slices.holders(name)
        if slices.rank not in holders:
            continue
        root = holders[i % len(holders)]
        for stored, tensor, parts in store.stored(name, [slices.of(h) for h in holders]):
            if all(part == parts[0] for part in parts):
                out[stored] = tensor_checksum(stored, tensor)
            elif root != slices.rank:
                exchange.send(tensor, root)
            else:
                whole = _brought(tensor, dict(zip(holders, parts, strict=True)), exchange)
                out[stored] = _DIFFERENT if whole is None else tensor_checksum(stored, whole)
    return out


_DIFFERENT = "rows that are on two ranks differ"


def _brought(own: Tensor, parts: Mapping[int, range], exchange: GlooExchange) -> Tensor | None:
    """The whole tensor; None where ranks hold the same rows with different bytes. parts: the rows of each rank, which
    begin no later than those of the next one."""
    whole: Tensor | None = None
    done, alike = 0, True
    for rank, rows in parts.items():
        tensor = own
        if rank != exchange.rank:
            tensor = exchange.receive(torch.empty(len(rows), *own.shape[1:], dtype=own.dtype), rank)
        raw = tensor.contiguous().view(-1).view(torch.uint8).view(len(rows), -1)  # nan is equal to itself
        if whole is None:
            whole = raw.new_empty(max(r.stop for r in parts.values()), raw.shape[1])
        again = done - rows.start  # rows of scales of a block that several ranks have a part of
        alike &= torch.equal(whole[rows.start : done], raw[:again])
        whole[done : rows.stop] = raw[again:]
        done = rows.stop
    assert whole is not None, "a tensor that no rank holds"
    return whole.view(own.dtype).view(-1, *own.shape[1:]) if alike else None


def merged(of_ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The checksums of the whole server. Raises ValueError naming a tensor of which ranks hold different copies."""
    out: dict[str, str] = {}
    for rank, sums in enumerate(of_ranks):
        for name, digest in sums.items():
            if digest == _DIFFERENT:
                raise ValueError(_apart(name, "rows that two of them hold"))
            if out.setdefault(name, digest) != digest:
                raise ValueError(_apart(name, f"rank {rank} and one before it"))
    return out


def _apart(name: str, which: str) -> str:
    return f"the ranks of this server have different bytes of {name} ({which}): restart the server"

"""Row and layer selection on packs and traces: padding, and the rows and layers of a rank.

Letters: rows, L MoE layers, K experts per token, E experts, T packed tokens, N samples in a pack, P rows that a
context-parallel rank feeds, C = cp * P rows of all of them. Tokens of a pack go through padding, context-parallel slice
and sequence-parallel slice, and their routing rows must go through the same. The code that cuts routes and the code
that feeds tokens therefore both call `pack_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from routing_replay.checksums import ragged_arange, routes_term
from routing_replay.ids import id_dtype
from routing_replay.trace import RoutingTrace


def padding_ids(rows: int, *, num_layers: int, top_k: int, num_experts: int, first: int = 0) -> Tensor:
    """[rows, L, K] ids for padding tokens: valid, distinct in a row, and spread over all experts.

    Row i, counted from row `first`, has experts i*K .. i*K+K-1 modulo E: kernels do not accept -1, and a fixed set of
    experts would be overloaded. Raises ValueError when K > E.
    """
    if top_k > num_experts:
        raise ValueError(f"{top_k} experts per token of only {num_experts} experts: a row would have an expert twice")
    ids = torch.arange(first * top_k, (first + rows) * top_k).remainder(num_experts).to(id_dtype(num_experts))
    return ids.view(rows, 1, top_k).expand(rows, num_layers, top_k)


def take_rows(trace: RoutingTrace, index: Tensor) -> RoutingTrace:
    """Rows `index` [n] int64, in that order. Raises ValueError when one is outside the trace."""
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= len(trace)):
        raise ValueError(f"rows {int(index.min())}..{int(index.max())} are outside of a trace of {len(trace)} rows")
    return trace.map_rows(lambda t: t.index_select(0, index))


def place_rows(trace: RoutingTrace, index: Tensor) -> RoutingTrace:
    """Rows `index` [n] int64 in that order; -1 stands for padding, which gets `padding_ids`.

    Raises ValueError when a row is outside the trace.
    """
    real = index >= 0
    rows = take_rows(trace, index[real])
    if len(rows) == len(index):
        return rows

    def spread(t: Tensor) -> Tensor:
        out = t.new_zeros(len(index), *t.shape[1:])
        out[real] = t
        return out

    placed = rows.map_rows(spread)
    placed.experts[~real] = padding_ids(
        len(index) - len(rows),
        num_layers=len(trace.layers),
        top_k=trace.top_k,
        num_experts=trace.num_experts,
        first=len(rows),  # continues after the real rows: else all short packs start at expert 0
    ).to(placed.experts.device)
    return placed


def sequence_slice(trace: RoutingTrace, rank: int, size: int) -> RoutingTrace:
    """The contiguous rows of sequence-parallel rank `rank` of `size`. Raises ValueError if they do not divide."""
    if len(trace) % size:
        raise ValueError(f"{len(trace)} rows are not divisible over {size} sequence-parallel ranks: pad them first")
    n = len(trace) // size
    return trace.map_rows(lambda t: t[rank * n : (rank + 1) * n])


def select_layers(trace: RoutingTrace, layers: Sequence[int]) -> RoutingTrace:
    """The trace of `layers` alone (global numbers), those of one pipeline stage, with checksums of these layers.

    Raises ValueError naming the layers that the trace does not have.
    """
    column = {layer: i for i, layer in enumerate(trace.layers)}
    absent = [layer for layer in layers if layer not in column]
    if absent:
        raise ValueError(f"a trace of layers {list(trace.layers)} has no routes of layers {absent}")
    wanted = tuple(sorted(layers))
    others = [layer for layer in trace.layers if layer not in wanted]
    keep, drop = [column[i] for i in wanted], [column[i] for i in others]
    gates = None if trace.weights is None else trace.weights[:, drop]
    checksums = trace.checksums
    if checksums is not None:
        checksums = checksums - routes_term(trace.experts[:, drop], gates, others)
    return replace(
        trace,
        experts=trace.experts[:, keep],
        layers=wanted,
        checksums=checksums,
        layer_checksums=None if trace.layer_checksums is None else trace.layer_checksums[keep],
        weights=None if trace.weights is None else trace.weights[:, keep],
    )


def zigzag_index(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """Rows [n] int64 of a pack that belong to context-parallel rank `rank` of `size`.

    Each sequence of the pack is cut into 2*size chunks; a rank has chunk `rank` and chunk 2*size-1-`rank`, so that
    causal attention costs all ranks the same. Raises ValueError when a length in `cu_seqlens` [N+1], padding included,
    is not a multiple of 2*size.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    if bool((rest := lengths % (2 * size)).any()):
        wrong = int(lengths[rest.nonzero()[0, 0]])
        raise ValueError(f"a sequence of {wrong} tokens is not divisible into {2 * size} chunks: pad it first")
    chunk = lengths // (2 * size)
    both = torch.stack([starts + rank * chunk, starts + (2 * size - 1 - rank) * chunk], 1)
    return ragged_arange(both.flatten(), chunk.repeat_interleave(2))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """The rows and layers of a micro-batch that one rank needs; ranks with equal specs receive the same routes."""

    layers: tuple[int, ...]  # global numbers of the MoE layers of its pipeline stage, virtual stages included
    cp: int = 1
    cp_rank: int = 0
    multiple: int = 1  # the fed rows are padded to it: tensor-parallel ranks times the multiple of the kernels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackRows:
    """The row layout of one pack on one rank."""

    rows: Tensor  # [P] int64: the token of each row that this rank feeds, -1 for padding
    home: Tensor  # [T] int64: the place of each token in the C rows of all context-parallel ranks, concatenated
    cu_seqlens: Tensor  # [N+1 or N+2] int32, padding included


def _padded_lengths(lengths: Tensor, multiple: int, cp: int) -> Tensor:
    """Segment lengths that divide into context-parallel chunks, and one more segment of padding where the rows of a
    rank would not be a multiple: no real token's attention or position depends on padding."""
    if cp == 1:
        unit = multiple
    else:
        lengths = (lengths + 2 * cp - 1) // (2 * cp) * (2 * cp)
        unit = cp * math.lcm(2, multiple)
    missing = -int(lengths.sum()) % unit
    return torch.cat([lengths, lengths.new_tensor([missing])]) if missing else lengths


def pack_rows(cu_seqlens: Tensor, shard: ShardSpec) -> PackRows:
    """The rows of a pack of samples that end at `cu_seqlens` [N+1], on the CPU, as the rank of `shard` feeds them.

    The result depends on the arguments alone, so the rank that feeds tokens and the process that cuts routes for it
    both compute it.
    """
    lengths, cp = cu_seqlens.diff().long(), shard.cp
    padded = _padded_lengths(lengths, shard.multiple, cp)
    ends = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    place = ragged_arange(ends[: len(lengths)], lengths)  # [T] of each token in the padded pack
    source = torch.full((int(ends[-1]),), -1)
    source[place] = torch.arange(len(place))
    if cp == 1:
        return PackRows(rows=source, home=place, cu_seqlens=ends.int())
    of_rank = [zigzag_index(ends, r, cp) for r in range(cp)]
    inverse = torch.empty_like(source)
    inverse[torch.cat(of_rank)] = torch.arange(len(source))
    return PackRows(rows=source[of_rank[shard.cp_rank]], home=inverse[place], cu_seqlens=ends.int())

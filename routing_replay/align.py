"""Shape work on traces: rows to pad, rows and layers that a rank has.

Letters: rows, L MoE layers, K experts a token, E experts. Tokens of a pack go through padding, context-parallel slice
and sequence-parallel slice; their rows must go through the same, which is what these functions are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from routing_replay.trace import RoutingTrace, id_dtype


def padding_ids(rows: int, *, num_layers: int, top_k: int, num_experts: int, first: int = 0) -> Tensor:
    """[rows, L, K] ids for tokens that count for nothing: valid, distinct in a row, and spread over all experts.

    Row i has experts i*K .. i*K+K-1 modulo E, counted from row `first`; -1 is no expert and one fixed set of experts
    would be overloaded. Raises ValueError when K > E.
    """
    if top_k > num_experts:
        raise ValueError(f"{top_k} experts a token of {num_experts}: no row can hold them without one twice")
    ids = torch.arange(first * top_k, (first + rows) * top_k).remainder(num_experts).to(id_dtype(num_experts))
    return ids.view(rows, 1, top_k).expand(rows, num_layers, top_k)


def pad_rows(trace: RoutingTrace, rows: int) -> RoutingTrace:
    """`trace` followed by padding rows up to `rows`. Raises ValueError when it has more than that."""
    missing = rows - len(trace)
    if missing < 0:
        raise ValueError(f"a trace of {len(trace)} rows cannot be padded to {rows}")
    if not missing:
        return trace
    padding = padding_ids(
        missing, num_layers=len(trace.layers), top_k=trace.top_k, num_experts=trace.num_experts, first=len(trace)
    )
    return replace(trace, experts=torch.cat([trace.experts, padding.to(trace.experts.device)]))


def take_rows(trace: RoutingTrace, index: Tensor) -> RoutingTrace:
    """Rows `index` [n] int64, in its order. Raises ValueError when one is outside the trace."""
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= len(trace)):
        raise ValueError(f"rows {int(index.min())}..{int(index.max())} of a trace of {len(trace)} rows")
    return replace(trace, experts=trace.experts.index_select(0, index))


def sequence_slice(trace: RoutingTrace, rank: int, size: int) -> RoutingTrace:
    """The rows of sequence-parallel rank `rank` of `size`: a contiguous part. ValueError if it does not divide."""
    if len(trace) % size:
        raise ValueError(f"{len(trace)} rows do not divide over {size} sequence-parallel ranks: pad them first")
    n = len(trace) // size
    return replace(trace, experts=trace.experts[rank * n : (rank + 1) * n])


def select_layers(trace: RoutingTrace, layers: Sequence[int]) -> RoutingTrace:
    """Only `layers`, by global number: those of one pipeline stage. Raises ValueError naming those it does not have."""
    column = {layer: i for i, layer in enumerate(trace.layers)}
    absent = [layer for layer in layers if layer not in column]
    if absent:
        raise ValueError(f"no routes of layers {absent} in a trace of layers {list(trace.layers)}")
    wanted = tuple(sorted(layers))
    return replace(trace, experts=trace.experts[:, [column[i] for i in wanted]], layers=wanted)


def zigzag_index(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """Rows [n] int64 of a pack that context-parallel rank `rank` of `size` has.

    Each sequence of the pack is cut into 2*size chunks; a rank has chunk `rank` and chunk 2*size-1-`rank`, so that
    causal attention costs all ranks the same. Raises ValueError when a length that `cu_seqlens` [N+1] tells of, padding
    included, is no multiple of 2*size.
    """
    parts = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        chunk, rest = divmod(end - start, 2 * size)
        if rest:
            raise ValueError(f"a sequence of {end - start} tokens does not divide into {2 * size} chunks: pad it first")
        for c in (rank, 2 * size - 1 - rank):
            parts.append(torch.arange(start + c * chunk, start + (c + 1) * chunk))
    return torch.cat(parts)

"""A micro-batch -> what this rank feeds: padded, cut over context-parallel ranks, with its own part of the routes.

Letters: T packed tokens, N samples in a pack, P rows that this context-parallel rank feeds, C = cp * P rows of all of
them, K experts a token, D depths of multi-token prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_bridge.mtp import ahead
from megatron_bridge.parallel import ParallelContext
from miles_like.types import MicroBatch
from routing_replay.align import place_rows, ragged_arange, select_layers, sequence_slice, zigzag_index
from routing_replay.trace import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """One micro-batch as this rank sees it. Every tensor-parallel rank is fed all P rows (the embedding splits them);
    only what enters below the embedding, the routing rows, is sliced here."""

    batch: MicroBatch  # on the device, unpadded
    tokens: Tensor  # [1, P] int64
    labels: Tensor  # [1 + D, P] int64: row k is the label k further on, see mtp.ahead
    positions: Tensor  # [1, P] int64
    loss_mask: Tensor  # [1 + D, P] bool, False on padding
    packed: PackedSeqParams
    home: Tensor  # [T] int64: where each token is among the C rows of all context-parallel ranks, laid end to end
    real: Tensor  # [P / tp] bool: this rank's rows that are tokens of a micro-batch with loss
    routing: RoutingTrace | None  # [P / tp, L, K]: L are the MoE layers of this stage


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Where the rows of one pack come from and go to."""

    rows: Tensor  # [P] int64: the token of each row that this rank feeds, -1 for padding
    home: Tensor  # [T] int64, see Shard
    cu_seqlens: Tensor  # [N+1 or N+2] int32, padding included


def _padded_lengths(lengths: Tensor, tp: int, cp: int) -> Tensor:
    """Segments that divide into context-parallel chunks, and one more of padding alone where the rows of a rank would
    not divide over tensor-parallel ranks: no real token's attention or position depends on padding."""
    if cp == 1:
        unit = tp
    else:
        lengths = (lengths + 2 * cp - 1) // (2 * cp) * (2 * cp)
        unit = cp * math.lcm(2, tp)
    missing = -int(lengths.sum()) % unit
    return torch.cat([lengths, lengths.new_tensor([missing])]) if missing else lengths


def _rows(cu_seqlens: Tensor, tp: int, cp: int, cp_rank: int) -> _Rows:
    """On the CPU, whatever the device: a handful of small integer operations a micro-batch."""
    lengths = cu_seqlens.diff().long()
    padded = _padded_lengths(lengths, tp, cp)
    ends = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    place = ragged_arange(ends[: len(lengths)], lengths)  # [T] of each token in the padded pack
    source = torch.full((int(ends[-1]),), -1)
    source[place] = torch.arange(len(place))
    if cp == 1:
        return _Rows(source, place, ends.int())
    parts = [zigzag_index(ends, r, cp) for r in range(cp)]
    inverse = torch.empty_like(source)
    inverse[torch.cat(parts)] = torch.arange(len(source))
    return _Rows(source[parts[cp_rank]], inverse[place], ends.int())


def _packed_params(cu_seqlens: Tensor) -> PackedSeqParams:
    # the longest segment, not the pack: at max_seqlen equal to the pack rope would take positions from its start
    longest = int(cu_seqlens.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _on(batch: MicroBatch, device: torch.device) -> MicroBatch:
    if batch.tokens.device == device:
        return batch
    return MicroBatch(
        tokens=batch.tokens.to(device),
        labels=batch.labels.to(device),
        positions=batch.positions.to(device),
        cu_seqlens=batch.cu_seqlens.to(device),
        loss_mask=batch.loss_mask.to(device),
        advantages=batch.advantages.to(device),
        rollout_logprobs=batch.rollout_logprobs.to(device),
        routing=batch.routing,
    )


def shard(
    batch: MicroBatch,
    parallel: ParallelContext,
    device: torch.device,
    *,
    layers: tuple[int, ...],
    num_experts: int,
    depths: int = 0,
    token_multiple: int = 1,
) -> Shard:
    """`batch` for this rank; `layers` are the global numbers of the MoE layers of its pipeline stage,
    `depths` how many labels more than the next one each row carries. The rows of every rank are a multiple of
    `token_multiple`, as FP8 products want.

    A micro-batch without any loss (what fills up unequal rows) has no real row: it enters no statistic of the routers.
    Raises ValueError when the batch is empty or its routing lacks one of `layers` or is of another model.
    """
    if not len(batch.tokens):
        raise ValueError("an empty micro-batch cannot be fed: give each rank at least one sample")
    tp, cp = parallel.config.tp, parallel.config.cp
    at = _rows(batch.cu_seqlens.cpu(), tp * token_multiple, cp, parallel.cp_rank)
    real = (at.rows.chunk(tp)[parallel.tp_rank] >= 0) & bool(batch.loss_mask.any())
    routing = None
    if batch.routing is not None:
        if batch.routing.num_experts != num_experts:
            raise ValueError(f"routes over {batch.routing.num_experts} experts do not fit a model of {num_experts}")
        routing = sequence_slice(place_rows(select_layers(batch.routing, layers), at.rows), parallel.tp_rank, tp)
        routing = replace(routing, experts=routing.experts.to(device))
    batch, rows = _on(batch, device), at.rows.to(device)
    is_token = rows >= 0

    def fed(x: Tensor) -> Tensor:
        """[..., T] -> [..., P], 0 on padding."""
        return x.index_select(-1, rows.clamp(min=0)) * is_token

    labels, loss_mask = ahead(batch.labels, batch.loss_mask, batch.cu_seqlens, depths)

    return Shard(
        batch=batch,
        tokens=fed(batch.tokens[None]),
        labels=fed(labels),
        positions=fed(batch.positions[None]),
        loss_mask=fed(loss_mask),
        packed=_packed_params(at.cu_seqlens.to(device)),
        home=at.home.to(device),
        real=real.to(device),
        routing=routing,
    )

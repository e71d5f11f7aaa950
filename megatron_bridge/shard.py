"""A micro-batch -> what this rank feeds: padded, cut over context-parallel ranks, with its own part of the routes.

Letters: T packed tokens, N samples in a pack, P rows that this context-parallel rank feeds, C = cp * P rows of all of
them, K experts a token, D depths of multi-token prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_bridge.mtp import ahead
from megatron_bridge.parallel import ParallelContext
from miles_like.types import MicroBatch
from routing_replay.align import RankPart, pack_rows, sequence_slice
from routing_replay.ids import of_samples
from routing_replay.parts import cut_routes, fed_routes
from routing_replay.tape import FedRows
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
    fed: FedRows  # P / tp rows: whose routing rows these are, or would be


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
    streams = ("tokens", "labels", "positions", "cu_seqlens", "loss_mask", "advantages", "rollout_logprobs")
    moved = {name: getattr(batch, name).to(device) for name in streams}
    moved["streams"] = {name: stream.to(device) for name, stream in batch.streams.items()}
    moved |= {n: x.to(device) for n in ("weights", "candidates") if (x := getattr(batch, n)) is not None}
    return replace(batch, **moved)


def _routes(batch: MicroBatch, part: RankPart, num_experts: int) -> RoutingTrace | None:
    """[P, L, K] on the CPU."""
    routes = batch.routing
    if routes is None:
        return None
    if isinstance(routes, RoutingTrace):
        routes = cut_routes(routes, batch.samples, batch.cu_seqlens.cpu(), part)
    if routes.trace.num_experts != num_experts:
        raise ValueError(
            f"{of_samples(batch.samples)}: routes over {routes.trace.num_experts} experts do not fit a model of "
            f"{num_experts}"
        )
    return fed_routes(routes, batch.samples, batch.tokens.cpu(), batch.cu_seqlens.cpu(), part)


def shard(
    batch: MicroBatch,
    parallel: ParallelContext,
    device: torch.device,
    *,
    part: RankPart,
    num_experts: int,
    depths: int = 0,
) -> Shard:
    """`batch` for this rank, which has `part` of it; `depths`: how many labels more than the next one each row carries.

    Its routes are whole, or were cut for this rank already. A micro-batch without any loss (what fills up unequal rows)
    has no real row: it enters no statistic of the routers. Raises ValueError when the batch is empty, its routing lacks
    one of the rank's layers or is of another model, and what `fed_routes` refuses.
    """
    if not len(batch.tokens):
        raise ValueError("an empty micro-batch cannot be fed: give each rank at least one sample")
    tp = parallel.config.tp
    ends = batch.cu_seqlens.cpu()
    at = pack_rows(ends, part)
    own = FedRows(samples=batch.samples, ends=ends, tokens=at.rows.chunk(tp)[parallel.tp_rank])
    real = (own.tokens >= 0) & bool(batch.loss_mask.any())
    routing = _routes(batch, part, num_experts)
    if routing is not None:
        routing = sequence_slice(routing, parallel.tp_rank, tp)
        routing = routing.map_rows(lambda x: x.to(device))
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
        fed=own,
    )

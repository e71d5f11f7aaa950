"""A micro-batch -> what this rank feeds: padded, cut over context-parallel ranks, with its own part of the routes; and
what the model says of the rows -> what it says of the micro-batch's tokens.

Letters: T packed tokens, N samples in a pack, P rows that this context-parallel rank feeds, R = cp * P rows of all of
them, K experts a token, D depths of multi-token prediction, C candidates a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

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
    labels: Tensor  # [1 + D + C, P] int64: row k <= D is the label k further on, see mtp.ahead; then the candidates
    positions: Tensor  # [1, P] int64
    loss_mask: Tensor  # [1 + D, P] bool, False on padding
    packed: PackedSeqParams
    home: Tensor  # [T] int64: where each token is among the R rows of all context-parallel ranks, laid end to end
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
    if batch.candidates is not None:
        labels = torch.cat([labels, batch.candidates.t()])

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


class _Whole(torch.autograd.Function):
    """One collective for all; what the loss did not use gets no gradient at all, not one of zeros."""

    @staticmethod
    def forward(ctx: Any, home: Tensor, group: ProcessGroup, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(home)
        ctx.group, ctx.rows = group, len(outputs[0])
        ctx.set_materialize_grads(False)
        columns = [x.reshape(len(x), -1) for x in outputs]
        if group.size() > 1:
            joined = gather_from_sequence_parallel_region(
                torch.cat(columns, 1), tensor_parallel_output_grad=False, group=group
            )
            columns = list(joined.split([x.shape[1] for x in columns], 1))
        return tuple(
            found.index_select(0, home).reshape(-1, *x.shape[1:]) for found, x in zip(columns, outputs, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        (home,) = ctx.saved_tensors
        first = ctx.group.rank() * ctx.rows

        def own(grad: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            blank = grad.new_zeros(ctx.group.size() * ctx.rows, *grad.shape[1:])
            return blank.index_copy_(0, home, grad)[first : first + ctx.rows]

        return None, None, *map(own, grads)


def whole(s: Shard, outputs: Sequence[Tensor], group: ProcessGroup) -> tuple[Tensor, ...]:
    """What the model said of each row of this context-parallel rank, [P] or [P, C] each, told of each token of the
    pack: [T] or [T, C].

    Every rank of `group` computes the loss of the whole pack, so that it sees whole samples, and takes back the
    gradient of its own rows. Collective where that is more than one rank.
    """
    return _Whole.apply(s.home, group, *outputs)  # type: ignore[no-any-return]

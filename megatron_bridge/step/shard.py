"""Cuts a micro-batch into this rank's model inputs (padding, context-parallel slice, routes), and gathers the model's
outputs per row into outputs per token of the micro-batch.

Letters: T packed tokens, N samples in a pack, P rows that this context-parallel rank feeds, R = cp * P rows of all of
them, K experts per token, D depths of multi-token prediction, C candidates per token.
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

from megatron_bridge.device.parallel import ParallelContext
from megatron_bridge.model.mtp import shift_labels
from megatron_bridge.model.packed_rope import on_device
from miles_like.types import MicroBatch
from routing_replay.align import ShardSpec, pack_rows, sequence_slice
from routing_replay.ids import of_samples
from routing_replay.rank_routes import cut_routes, fed_routes
from routing_replay.replay import FedRows
from routing_replay.trace import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """This rank's share of one micro-batch. Every tensor-parallel rank is fed all P rows, which the embedding splits;
    only the routing rows, which enter below the embedding, are sliced here."""

    batch: MicroBatch  # on the device, unpadded
    tokens: Tensor  # [1, P] int64
    labels: Tensor  # [1 + D + C, P] int64: row k <= D is the label k later, see mtp.shift_labels; then the candidates
    positions: Tensor  # [1, P] int64
    loss_mask: Tensor  # [1 + D, P] bool, False on padding
    packed: PackedSeqParams
    token_rows: Tensor  # [T] int64: each token's row among the R concatenated rows of all context-parallel ranks
    real: Tensor  # [P / tp] bool: this rank's rows that are tokens of a micro-batch with loss
    routing: RoutingTrace | None  # [P / tp, L, K]: L are the MoE layers of this stage
    fed: FedRows  # P / tp rows: the tokens that the routing rows belong to


def _packed_params(ends: Tensor, device: torch.device) -> PackedSeqParams:
    # the longest segment, not the pack: with max_seqlen equal to the pack, rope would count positions from its start
    longest, cu_seqlens = int(ends.diff().max()), on_device(ends, device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    if batch.tokens.device == device:
        return batch
    streams = ("tokens", "labels", "positions", "cu_seqlens", "loss_mask", "advantages", "rollout_logprobs")
    moved = {name: getattr(batch, name).to(device) for name in streams}
    moved["streams"] = {name: stream.to(device) for name, stream in batch.streams.items()}
    moved |= {n: x.to(device) for n in ("weights", "candidates") if (x := getattr(batch, n)) is not None}
    return replace(batch, **moved)


def _routes(batch: MicroBatch, shard_spec: ShardSpec, num_experts: int) -> RoutingTrace | None:
    """[P, L, K] on the CPU."""
    routes = batch.routing
    if routes is None:
        return None
    if isinstance(routes, RoutingTrace):
        routes = cut_routes(routes, batch.samples, batch.cu_seqlens.cpu(), shard_spec)
    if routes.trace.num_experts != num_experts:
        raise ValueError(
            f"{of_samples(batch.samples)}: routes over {routes.trace.num_experts} experts, but the model has "
            f"{num_experts}: check that rollout and trainer have the same config.json"
        )
    return fed_routes(routes, batch.samples, batch.tokens.cpu(), batch.cu_seqlens.cpu(), shard_spec)


def shard(
    batch: MicroBatch,
    parallel: ParallelContext,
    device: torch.device,
    *,
    shard_spec: ShardSpec,
    num_experts: int,
    depths: int = 0,
) -> Shard:
    """This rank's share of `batch`, given by `shard_spec`; `depths`: further labels per row for multi-token prediction.

    The batch's routes are complete, or already cut for this rank. A micro-batch without loss tokens (a filler where
    ranks have unequal numbers of micro-batches) has no real row: the routers' statistics exclude it. Raises ValueError
    for an empty batch, for routes that lack one of the rank's layers or are of another model, and as `fed_routes`.
    """
    if not len(batch.tokens):
        raise ValueError("an empty micro-batch is not supported: give each rank at least one sample")
    tp = parallel.config.tp
    ends = batch.cu_seqlens.cpu()
    at = pack_rows(ends, shard_spec)
    own = FedRows(samples=batch.samples, ends=ends, tokens=at.rows.chunk(tp)[parallel.tp_rank])
    real = (own.tokens >= 0) & bool(batch.loss_mask.any())
    routing = _routes(batch, shard_spec, num_experts)
    if routing is not None:
        routing = sequence_slice(routing, parallel.tp_rank, tp)
        routing = routing.map_rows(lambda x: x.to(device))
    batch, rows = _to_device(batch, device), at.rows.to(device)
    is_token = rows >= 0

    def fed(x: Tensor) -> Tensor:
        """[..., T] -> [..., P], 0 on padding."""
        return x.index_select(-1, rows.clamp(min=0)) * is_token

    labels, loss_mask = shift_labels(batch.labels, batch.loss_mask, batch.cu_seqlens, depths)
    if batch.candidates is not None:
        labels = torch.cat([labels, batch.candidates.t()])

    return Shard(
        batch=batch,
        tokens=fed(batch.tokens[None]),
        labels=fed(labels),
        positions=fed(batch.positions[None]),
        loss_mask=fed(loss_mask),
        packed=_packed_params(at.cu_seqlens, device),
        token_rows=at.home.to(device),
        real=real.to(device),
        routing=routing,
        fed=own,
    )


class _GatherTokens(torch.autograd.Function):
    """One collective for all outputs; an output that the loss does not use gets no gradient rather than zeros."""

    @staticmethod
    def forward(ctx: Any, token_rows: Tensor, group: ProcessGroup, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(token_rows)
        ctx.group, ctx.rows = group, len(outputs[0])
        ctx.set_materialize_grads(False)
        columns = [x.reshape(len(x), -1) for x in outputs]
        if group.size() > 1:
            joined = gather_from_sequence_parallel_region(
                torch.cat(columns, 1), tensor_parallel_output_grad=False, group=group
            )
            columns = list(joined.split([x.shape[1] for x in columns], 1))
        return tuple(
            found.index_select(0, token_rows).reshape(-1, *x.shape[1:])
            for found, x in zip(columns, outputs, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (token_rows,) = ctx.saved_tensors
        first = ctx.group.rank() * ctx.rows

        def own(grad: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            blank = grad.new_zeros(ctx.group.size() * ctx.rows, *grad.shape[1:])
            return blank.index_copy_(0, token_rows, grad)[first : first + ctx.rows]

        return None, None, *map(own, grads)


def gather_tokens(s: Shard, outputs: Sequence[Tensor], group: ProcessGroup) -> tuple[Tensor, ...]:
    """Model outputs per row of this context-parallel rank, [P] or [P, C] each -> per token of the pack: [T] or [T, C].

    Every rank of `group` computes the loss of the whole pack, so that the loss sees whole samples; backward keeps the
    gradient of the rank's own rows. Collective if the group has more than one rank.
    """
    gathered: tuple[Tensor, ...] = _GatherTokens.apply(s.token_rows, group, *outputs)  # type: ignore[no-untyped-call]
    return gathered

"""A micro-batch -> what this rank feeds: padded to the sequence-parallel split, and its own slice of the routing rows.

Letters: T packed tokens, P = T padded to a multiple of tp, N samples in a pack, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_bridge.parallel import ParallelContext
from miles_like.types import MicroBatch
from routing_replay.align import pad_rows, select_layers, sequence_slice
from routing_replay.trace import RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """One micro-batch as this rank sees it. Every tensor-parallel rank is fed the whole pack (the embedding splits it);
    only what enters below the embedding, the routing rows, is sliced here."""

    batch: MicroBatch  # on the device, unpadded
    tokens: Tensor  # [1, P] int64
    labels: Tensor  # [1, P] int64
    positions: Tensor  # [1, P] int64
    loss_mask: Tensor  # [1, P] bool, False on padding
    packed: PackedSeqParams
    real: Tensor  # [P / tp] bool: this rank's rows that are tokens, not padding
    routing: RoutingTrace | None  # [P / tp, L, K]: L are the MoE layers of this stage


def _packed_params(cu_seqlens: Tensor, padded: int) -> PackedSeqParams:
    """Padding is one more segment, so that no real token's attention or position depends on it."""
    if padded > int(cu_seqlens[-1]):
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_tensor([padded])])
    # the longest segment, not the pack: at max_seqlen == P rope would take positions from the pack's start
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
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
    batch: MicroBatch, parallel: ParallelContext, device: torch.device, *, layers: tuple[int, ...], num_experts: int
) -> Shard:
    """`batch` for this rank; `layers` are the global numbers of the MoE layers of its pipeline stage.

    Raises ValueError when the batch is empty or its routing lacks one of `layers` or is of another model.
    """
    t = len(batch.tokens)
    if t == 0:
        raise ValueError("an empty micro-batch cannot be fed: give each rank at least one sample")
    pad = -t % parallel.config.tp
    batch = _on(batch, device)
    routing = None
    if batch.routing is not None:
        if batch.routing.num_experts != num_experts:
            raise ValueError(f"routes over {batch.routing.num_experts} experts do not fit a model of {num_experts}")
        routing = pad_rows(select_layers(batch.routing, layers), t + pad)
        routing = sequence_slice(routing, parallel.tp_rank, parallel.config.tp)
        routing = replace(routing, experts=routing.experts.to(device))
    real = (torch.arange(t + pad, device=device) < t).chunk(parallel.config.tp)[parallel.tp_rank]

    def padded(x: Tensor) -> Tensor:
        return F.pad(x, (0, pad))[None]

    return Shard(
        batch=batch,
        tokens=padded(batch.tokens),
        labels=padded(batch.labels),
        positions=padded(batch.positions),
        loss_mask=padded(batch.loss_mask),
        packed=_packed_params(batch.cu_seqlens, t + pad),
        real=real,
        routing=routing,
    )

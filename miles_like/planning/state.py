"""Bytes of a rank that live from step to step: parameters, gradients, optimizer state, rounded copies.

Functions of megatron-core 0.16.1 that allocate them: `_ParamAndGradBuffer.__init__` (parameters and FP32 gradients in
padded buffers), `DistributedOptimizer._build_model_and_main_param_groups` (masters), `HybridDeviceOptimizer` (state on
the host). Per parameter this is what Megatron-LM's theoretical_memory_usage.py counts: 18 bytes, or 6 + 12 / (data
parallel ranks) with a distributed optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_bridge.config import ParallelConfig, TrainerConfig
from miles_like.planning.parts import Bytes, Part, total
from miles_like.planning.weights import Held, Kind, StageWeights

_ALIGN = 64  # elements at whose multiples a parameter of a buffer begins: _pad_start_of_param_if_needed
_BUCKET = 128  # and a bucket ends, if the ranks divide it: _pad_end_of_bucket_if_needed
_FP32 = 4
_MOMENTS = 8  # of AdamW: two FP32 numbers
_FP8_COPIES = 2  # of a weight in TransformerEngine's FP8 products: the codes and their transpose


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """Bytes of one rank's optimizer on the host."""

    masters: int = 0
    moments: int = 0
    gradients: int = 0  # pinned: `HybridDeviceOptimizer._set_sub_optimizer_grads`

    @property
    def total(self) -> int:
        return self.masters + self.moments + self.gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What one rank keeps, in bytes."""

    device: Bytes
    buffers: tuple[int, ...]  # of each parameter buffer; each is one storage, as the host's copy while a rank sleeps
    host: HostState
    building: int  # the peak on the device while model, buffers and optimizer are built, in bytes
    host_building: int  # the same on the host


def data_ranks(layout: ParallelConfig, kind: Kind) -> int:
    """Ranks that hold the same parameters, over which the optimizer's state is sharded."""
    ranks = layout.dp * layout.cp
    return ranks if kind == "dense" else ranks * layout.tp // (layout.ep * layout.etp)


def rank_state(weights: StageWeights, config: TrainerConfig) -> RankState:
    """The state of a rank once its optimizer has taken a step."""
    width = 2 if config.params_dtype == "bfloat16" else _FP32
    moves = tuple(_moves(weights, config))
    updated = sum(move.updated for move in moves)
    in_buffers = sum(move.buffer for move in moves)
    fixed = width * weights.elements(trained=False) + _FP32 * sum(h.total for h in weights.held if h.fp32)
    offloaded = math.ceil(updated * config.kernels.offload_optimizer)
    parts: dict[Part, int] = {
        "parameters": fixed + width * in_buffers,
        "gradients": _FP32 * in_buffers,
        "masters": _FP32 * (updated - offloaded) if width == 2 else 0,
        "moments": _MOMENTS * (updated - offloaded),
        "rounded weights": _rounded(weights, config, width),
    }
    host = HostState(masters=_FP32 * offloaded, moments=_MOMENTS * offloaded, gradients=_FP32 * offloaded)
    moving = max((fixed + n for n in _moving(moves, width)), default=fixed)
    return RankState(
        device={part: n for part, n in parts.items() if n},
        buffers=tuple(width * move.buffer for move in moves if move.buffer),
        host=host,
        building=max(moving, _finishing(weights, config, parts)),
        host_building=_FP32 * weights.elements(trained=True) + host.masters if offloaded else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """Elements of the parameters that move to one buffer."""

    held: int  # as modules allocate them
    buffer: int  # with padding
    updated: int  # by this rank's optimizer


def _moves(weights: StageWeights, config: TrainerConfig) -> Iterator[_Move]:
    """In the order of `DistributedDataParallel.__init__`: chunk by chunk, dense parameters before experts."""
    kinds: tuple[Kind, ...] = ("dense", "expert")
    for chunk in weights.chunks:
        for kind in kinds:
            own = [h for h in chunk if h.trained and h.kind == kind]
            held, ranks = sum(h.total for h in own), data_ranks(config.parallel, kind)
            shards = ranks if config.distributed_optimizer else 1
            buffer = _buffer(own, ranks, config.distributed_optimizer)
            yield _Move(held=held, buffer=buffer, updated=-(-held // shards))


def _buffer(held: list[Held], ranks: int, distributed: bool) -> int:
    """Elements of a buffer. Buckets inside of it are not counted: each adds less than the padding of one."""
    if not held:
        return 0
    if not distributed:
        return sum(h.total for h in held)
    divisor = math.lcm(ranks, _BUCKET)
    return -(-sum(-(-h.elements // _ALIGN) * _ALIGN * h.count for h in held) // divisor) * divisor


def _rounded(weights: StageWeights, config: TrainerConfig, width: int) -> int:
    """Copies of quantization-aware training (fake_quant.py's `_weight`), or of TransformerEngine's FP8 products, which
    are made from the BF16 parameters or, with fp8_param_gather, beside them."""
    copies = width * sum(h.total for h in weights.held if h.rounded)
    if config.kernels.fp8 != "none":
        copies += _FP8_COPIES * sum(h.total for h in weights.held if h.linear)
    return copies


def _moving(moves: Sequence[_Move], width: int) -> Iterator[int]:
    """Bytes alive while each buffer is filled: the buffers so far, and all parameters that are not in one yet, those
    of this buffer too."""
    each = width + _FP32
    for k, move in enumerate(moves):
        yield each * sum(m.buffer for m in moves[: k + 1]) + width * (move.held + sum(m.held for m in moves[k + 1 :]))


def _finishing(weights: StageWeights, config: TrainerConfig, parts: Mapping[Part, int]) -> int:
    """Bytes alive while the optimizer is built, and with everything. With a part of the optimizer on the host,
    `HybridDeviceOptimizer` first makes FP32 copies of the rest of all parameters, unsharded."""
    moved, share = parts["parameters"] + parts["gradients"], config.kernels.offload_optimizer
    unsharded = math.ceil(_FP32 * weights.elements(trained=True) * (1 - share)) if 0 < share < 1 else 0
    if share:  # a copy of each parameter on its way to the host
        unsharded += 2 * max((h.elements for h in weights.held if h.trained), default=0)
    return max(moved + unsharded + parts["masters"], total(parts))

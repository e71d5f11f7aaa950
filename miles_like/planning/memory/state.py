"""Bytes of a rank that live from step to step: parameters, gradients, optimizer state, rounded copies.

Functions of megatron-core 0.16.1 that allocate them: `_ParamAndGradBuffer.__init__` (parameters and FP32 gradients in
padded buffers), `DistributedOptimizer._build_model_and_main_param_groups` (masters), `HybridDeviceOptimizer` (state on
the host). Per parameter this is what Megatron-LM's theoretical_memory_usage.py counts: 18 bytes, or 6 + 12 / (data
parallel ranks) with a distributed optimizer.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_bridge.config import ParallelConfig, TrainerConfig
from miles_like.planning.memory.parts import Bytes, Part, total
from miles_like.planning.memory.weights import Held, Kind, StageWeights

_ALIGN = 64  # elements at whose multiples a parameter of a buffer begins: _pad_start_of_param_if_needed
_BUCKET = 128  # and a bucket ends, if the ranks divide it: _pad_end_of_bucket_if_needed
_FP32 = 4
_MOMENTS = 8  # of AdamW: two FP32 numbers
_LEAST_OF_BUCKET, _OF_BUCKET = 40_000_000, 1_000_000  # elements of a bucket where buckets overlap: at least, a rank
_KINDS: tuple[Kind, ...] = ("dense", "expert")  # in the order of the optimizers
_FP8_COPIES = 2  # of a weight in TransformerEngine's FP8 products: the codes and their transpose


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """Bytes of one rank's offloaded optimizer on the host."""

    masters: int = 0
    moments: int = 0
    gradients: int = 0  # pinned: `HybridDeviceOptimizer._set_sub_optimizer_grads`

    @property
    def total(self) -> int:
        return self.masters + self.moments + self.gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Bytes that one rank keeps from step to step."""

    device: Bytes
    buffers: tuple[int, ...]  # of each parameter buffer; each is one storage, as the host's copy while a rank sleeps
    host: HostState
    building: int  # the most on the device while model, buffers and optimizer are built, in bytes
    uncollected: int  # part of it that Python's garbage collector may have freed by then


def data_ranks(layout: ParallelConfig, kind: Kind) -> int:
    """Ranks that hold the same parameters, over which the optimizer's state is sharded."""
    ranks = layout.dp * layout.cp
    return ranks if kind == "dense" else ranks * layout.tp // (layout.ep * layout.etp)


def rank_state(weights: StageWeights, config: TrainerConfig, data_rank: int | None = None) -> RankState:
    """The state of a rank once its optimizer has taken a step.

    data_rank: the one among those that hold the same parameters. They differ where a part of the optimizer is on the
    host, which takes whole shards. None: the most that one has on the device, and the mean on the host.
    """
    width = 2 if config.params_dtype == "bfloat16" else _FP32
    moves = tuple(_moves(weights, config))
    updated = sum(move.updated for move in moves)
    in_buffers = sum(move.buffer for move in moves)
    fixed = width * weights.elements(trained=False) + _FP32 * sum(h.total for h in weights.held if h.fp32)
    split = _split(weights, config, updated, data_rank)
    parts: dict[Part, int] = {
        "parameters": fixed + width * in_buffers,
        "gradients": _FP32 * in_buffers,
        "masters": _FP32 * split.device if width == 2 else 0,
        "moments": _MOMENTS * split.device,
        "rounded weights": _rounded(weights, config, width),
    }
    offloaded = split.host
    host = HostState(masters=_FP32 * offloaded, moments=_MOMENTS * offloaded, gradients=_FP32 * offloaded)
    moving = max((fixed + n for n in _moving(moves, width)), default=fixed)
    building = max(moving, _finishing(weights, parts, split.building, offloaded > 0))
    return RankState(
        device={part: n for part, n in parts.items() if n},
        buffers=tuple(width * move.buffer for move in moves if move.buffer),
        host=host,
        building=building,
        uncollected=building - max(moving, _finishing(weights, parts, split.collected, offloaded > 0)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """Elements of the parameters that move to one buffer."""

    held: int  # as modules allocate them
    buffer: int  # with padding
    updated: int  # by this rank's optimizer


def _moves(weights: StageWeights, config: TrainerConfig) -> Iterator[_Move]:
    """In the order of `DistributedDataParallel.__init__`: chunk by chunk, dense parameters before experts."""
    for chunk in weights.chunks:
        for kind in _KINDS:
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
    return _padded(sum(_padded(h.elements, _ALIGN) * h.count for h in held), divisor)


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


def _finishing(weights: StageWeights, parts: Mapping[Part, int], copied: int, offloads: bool) -> int:
    """Bytes alive while the optimizer is built, and with everything. copied: FP32 elements while it is built."""
    moved = parts["parameters"] + parts["gradients"]
    # a copy of each parameter on its way to the host, before others are copied on the device
    leaving = 2 * max((h.elements for h in weights.held if h.trained), default=0) if offloads else 0
    return max(moved + max(leaving, parts["masters"], _FP32 * copied), total(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """Elements whose FP32 state a rank keeps on the device and on the host.

    `HybridDeviceOptimizer` copies all that it keeps, unsharded, before `DistributedOptimizer` gives it its shards. The
    first copies are in a cycle of references: they live until the garbage collector finds them.

    building: the most FP32 elements on the device while the optimizers are built; collected: if it finds them at once.
    """

    device: int
    host: int
    building: int = 0
    collected: int = 0


def _split(weights: StageWeights, config: TrainerConfig, updated: int, data_rank: int | None) -> _Split:
    """updated: elements of the mean rank's shards."""
    share = config.kernels.offload_optimizer
    if share in (0, 1):
        return _Split(device=updated * (share == 0), host=updated * (share == 1))
    of_kinds = [_Shards(weights, config, kind) for kind in _KINDS]
    device, host, building, collected = 0, 0, 0, 0
    for shards in of_kinds:
        ranks = range(shards.ranks) if data_rank is None else (data_rank % shards.ranks,)
        parts = [shards.of(rank) for rank in ranks]
        kept = [_kept(own, share) for own in parts]
        copied = _kept(shards.parameters, share) + max(kept)
        building, collected = building + copied, max(collected, device + copied)
        device += max(kept)
        host += sum(elements for own in parts for elements, _ in own) // len(ranks) - sum(kept) // len(kept)
    return _Split(device=device, host=host, building=building, collected=collected)


def _kept(parameters: Iterable[tuple[int, bool]], share: float) -> int:
    """Elements that `HybridDeviceOptimizer` keeps on the device. It takes whole (elements, vector) for the host, those
    with weight decay first, until they are `share` of all."""
    ordered = sorted(parameters, key=lambda parameter: parameter[1])
    wanted, taken, kept = share * sum(n for n, _ in ordered), 0, 0
    for elements, _ in ordered:
        if taken < wanted:
            taken += elements
        else:
            kept += elements
    return kept


class _Shards:
    """The trained parameters of one kind, and how the ranks that hold the same ones divide them: each bucket of a
    gradient buffer, whose parameters are in reverse, in equal runs."""

    def __init__(self, weights: StageWeights, config: TrainerConfig, kind: Kind) -> None:
        self.ranks = data_ranks(config.parallel, kind) if config.distributed_optimizer else 1
        chunks = [
            [h for h in chunk if h.trained and h.kind == kind for _ in range(h.count)] for chunk in weights.modules
        ]
        self.parameters = [(h.elements, h.vector) for chunk in chunks for h in chunk]
        buckets: list[list[tuple[int, bool]]] = []
        for number, chunk in enumerate(chunks):
            # later chunks and stages have one bucket each: DistributedDataParallel.__init__
            several = config.kernels.overlap_grad_reduce and number == 0 and weights.stage == 0
            dense = data_ranks(config.parallel, "dense")
            buckets += _buckets(chunk[::-1], max(_LEAST_OF_BUCKET, _OF_BUCKET * dense) if several else None)
        self._buckets = [(bucket, _starts(bucket)) for bucket in buckets]

    def of(self, rank: int) -> list[tuple[int, bool]]:
        """(elements, vector) of each parameter's part, in the order of the buffers."""
        return [part for bucket, starts in self._buckets for part in _run(bucket, starts, rank, self.ranks)]


def _buckets(parameters: Sequence[Held], size: int | None) -> Iterator[list[tuple[int, bool]]]:
    """A bucket ends with the parameter with which it has `size` elements (None: with the last one), and before and
    after one that is alone."""
    bucket: list[tuple[int, bool]] = []
    for held in parameters:
        if held.alone and bucket:
            yield bucket
            bucket = []
        bucket.append((held.elements, held.vector))
        if held.alone or (size is not None and sum(elements for elements, _ in bucket) >= size):
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _starts(bucket: Sequence[tuple[int, bool]]) -> list[int]:
    """Where each parameter of a bucket begins, and the end of the last one."""
    return list(itertools.accumulate((_padded(n, _ALIGN) for n, _ in bucket), initial=0))


def _run(
    bucket: Sequence[tuple[int, bool]], starts: Sequence[int], rank: int, ranks: int
) -> Iterator[tuple[int, bool]]:
    """The parts of parameters in one rank's run of a bucket."""
    run = _padded(starts[-1], math.lcm(ranks, _BUCKET)) // ranks
    begin, end = rank * run, (rank + 1) * run
    first = max(0, bisect.bisect_right(starts, begin) - 1)  # the parameter in which the run begins
    for start, (elements, vector) in zip(starts[first:], bucket[first:], strict=False):
        if start >= end:
            break
        part = min(start + elements, end) - max(start, begin)
        if part > 0:
            yield part, vector


def _padded(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple

"""Statistics of a step: combined over micro-batches, ranks and the optimizer steps of a rollout."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_bridge.device.collective_errors import gather_objects
from megatron_bridge.device.parallel import ParallelContext
from megatron_bridge.model.kernels.chosen import fused_parts
from miles_like.types import Reduce, Stat

Stats = dict[str, Stat]


def combine(several: Sequence[Mapping[str, Stat]]) -> Stats:
    """Combine the statistics of several micro-batches or optimizer steps: means over all items, sums, maxima or minima.

    A statistic that is missing in some of them is combined over the others.
    """
    out: Stats = {}
    for stats in several:
        for name, stat in stats.items():
            out[name] = _both(out[name], stat) if name in out else stat
    return out


def values(stats: Mapping[str, Stat]) -> dict[str, float]:
    """Each statistic as a number; a mean over zero items is omitted."""
    return {name: _value(stat) for name, stat in stats.items() if stat.count}


def parts_by_kernels() -> dict[str, float]:
    """perf/fused/{part} of the parts of a step that some rank computed: 1 where a kernel for CUDA devices did, 0 where
    plain PyTorch did; equal on all ranks. Collective."""
    parts: dict[str, bool] = {}
    for found in gather_objects(fused_parts()):
        for part, fused in found.items():
            parts[part] = fused or parts.get(part, False)
    return {f"perf/fused/{part}": float(fused) for part, fused in parts.items()}


def _both(a: Stat, b: Stat) -> Stat:
    of_totals = {Reduce.MAX: torch.maximum, Reduce.MIN: torch.minimum}.get(a.reduce, torch.add)
    return Stat(of_totals(a.total, b.total), a.count + b.count, a.reduce)


def _value(stat: Stat) -> float:
    return float(stat.total / stat.count if stat.reduce is Reduce.MEAN else stat.total)


def reduce_stats(outputs: Sequence[Mapping[str, Stat]], parallel: ParallelContext, device: torch.device) -> Stats:
    """Combine statistics over micro-batches and data-parallel ranks; the result is on every rank. Collective."""
    local = combine(outputs)
    kinds = _share_names({name: str(stat.reduce) for name, stat in sorted(local.items())}, parallel, device)
    sums = torch.zeros(len(kinds), 2, dtype=torch.float64, device=device)
    tops = torch.full((len(kinds),), -math.inf, dtype=torch.float64, device=device)
    sign: dict[str, int] = {Reduce.MAX: 1, Reduce.MIN: -1}  # the smallest is the largest of the negatives
    if parallel.counts_stats:
        for i, (name, kind) in enumerate(kinds.items()):
            sums[i, 1] = local[name].count
            if kind in sign:
                tops[i] = sign[kind] * local[name].total
            else:
                sums[i, 0] = local[name].total
    dist.all_reduce(sums)
    dist.all_reduce(tops, dist.ReduceOp.MAX)
    return {
        name: Stat(sign[kind] * tops[i] if kind in sign else sums[i, 0], sums[i, 1], Reduce(kind))
        for i, (name, kind) in enumerate(kinds.items())
    }


def _share_names(kinds: dict[str, str], parallel: ParallelContext, device: torch.device) -> dict[str, str]:
    """Broadcast the statistics' names, as JSON, from the last pipeline stage, the only one that runs the loss."""
    if parallel.config.pp == 1:
        return kinds
    text = json.dumps(kinds).encode()
    size = torch.tensor([len(text)], device=device)
    dist.broadcast(size, parallel.last_stage_rank, group=parallel.pp_group)
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if parallel.is_last_stage:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(data, parallel.last_stage_rank, group=parallel.pp_group)
    shared: dict[str, str] = json.loads(bytes(data.tolist()))
    return shared

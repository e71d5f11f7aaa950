"""Packs groups and their advantages into one train batch: a plan (plan.py), then the values (filling.py).

Letters: S tokens a sample, N samples a micro-batch, T packed tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from miles_like.batch.bins import Cost, Ints
from miles_like.batch.filling import FlatColumns
from miles_like.batch.plan import Plan, PlanSettings, StepSamples, plan, planned
from miles_like.records import PlannedBatch, SampleRecord
from miles_like.types import Aggregation, MicroBatch, Sample, SampleGroup, TrainBatch
from routing_replay.align import ShardSpec, take_rows
from routing_replay.rank_routes import RankRoutes, cut_routes
from routing_replay.trace import RoutingTrace
from routing_replay.versions import check_all_versions

A = TypeVar("A", bound=float | Tensor | None)  # of a sample: a number, [S] fp32, or what its holder has


def pack(
    groups: Sequence[SampleGroup],
    advantages: Sequence[Sequence[float | Tensor]],
    *,
    dp_size: int,
    max_tokens: int,
    micro_multiple: int = 1,
    cost: Cost | None = None,
    replayed: bool = True,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
    constant: int | None = None,
    together: bool = False,
) -> TrainBatch:
    """All samples of `groups` as one optimizer step for `dp_size` data-parallel rows.

    `advantages[g][i]` belongs to `groups[g].samples[i]`: a number, used at each of its positions, or [S] fp32, one for
    each token. `aggregation` selects the weights of the token losses (aggregation.py); `constant` is the length that
    CONSTANT divides by. `together`: the samples of a group share a micro-batch, adjacent and in their order.
    `max_tokens` bounds the inputs of a micro-batch. The number of micro-batches is a multiple of `micro_multiple` (an
    interleaved pipeline schedule needs its number of stages). `cost` is the load to balance; None: tokens. `replayed`:
    training uses the routes (replay.mode "r3"), so each must come from the weights that sampled the token after it;
    otherwise routes are only compared, and those recomputed after a retraction are allowed. The same arguments give the
    same batch. Samples without a loss token are dropped. A batch of only such samples is an error: it means that the
    servers abort every request or stop at once, and continuing would not end.

    Raises ValueError: no sample, or none with a response token; a sample, or a group with `together`, of more than
    `max_tokens` inputs; advantages that do not match the groups or are not finite; some samples with routing and some
    without; routes without checksums, or whose checksums do not fit them and their tokens; with `replayed`, routes of
    other weights than sampled the loss tokens, or whose weight version is unknown.
    """
    samples, values = _matched(groups, advantages)
    routed = check_routes(samples, replayed=replayed)
    flat = FlatColumns.of(names_of(samples), samples, values)
    how = PlanSettings(
        dp_size=dp_size,
        max_tokens=max_tokens,
        micro_multiple=micro_multiple,
        cost=cost,
        aggregation=aggregation,
        constant=constant,
        together=together,
    )
    of = StepSamples(
        names=flat.names,
        lengths=flat.lengths,
        counts=_loss_counts(flat),
        prompts=_prompts_of(groups),
        episodes=_episodes_of(groups),
        versions=_versions_of(samples),
    )
    made = plan(of, how)
    flat = flat.weighted(made.weights)
    traces = [s.routing for s in samples if s.routing is not None] if routed else None
    grid = tuple(tuple(_filled(cell, flat, made, traces) for cell in row) for row in made.grid)
    return TrainBatch(grid=grid, loss_tokens=made.loss_tokens, versions=made.versions)


def plan_records(
    groups: Sequence[SampleGroup],
    advantages: Sequence[Sequence[float | Tensor | None]],
    how: PlanSettings,
    *,
    replayed: bool,
    only: Sequence[str] | None = None,
) -> PlannedBatch:
    """As `pack`, of groups of records: the ranks fill the micro-batches. advantages: None where the holder has those of
    the tokens; only: as in PlannedBatch. Raises ValueError as `pack`, without what only the tokens and routes show;
    those are checked where they are."""
    samples, values = _matched(groups, advantages)
    records = [s for s in samples if isinstance(s, SampleRecord)]
    numbers = [v for v in values if not isinstance(v, Tensor)]
    assert len(records) == len(numbers) == len(samples), "records, with a number each"
    names, versions = names_of(samples), _versions_of(samples)
    of = StepSamples(
        names=names,
        lengths=np.array([s.length for s in samples], dtype=np.int64),
        counts=np.array([s.response_len for s in samples], dtype=np.int64),
        prompts=_prompts_of(groups),
        episodes=_episodes_of(groups),
        versions=versions,
    )
    made = plan(of, how)
    return PlannedBatch(
        grid=planned(made, names, numbers),
        loss_tokens=made.loss_tokens,
        versions=versions,
        records=dict(zip(names, records, strict=True)),
        replayed=replayed,
        only=None if only is None else tuple(only),
    )


def _versions_of(samples: Sequence[Sample]) -> tuple[int, int]:
    """Oldest and newest weight version of their tokens."""
    versions = [span.version for s in samples for span in s.versions] or [0]
    return min(versions), max(versions)


def _prompts_of(groups: Sequence[SampleGroup]) -> Ints:
    """[samples]: the number of each sample's prompt."""
    out: Ints = np.repeat(np.arange(len(groups)), [len(g.samples) for g in groups])
    return out


def _episodes_of(groups: Sequence[SampleGroup]) -> Ints:
    """[samples]: the number of each sample's episode."""
    numbers: dict[tuple[int, int], int] = {}
    of = [numbers.setdefault((g, s.index), len(numbers)) for g, group in enumerate(groups) for s in group.samples]
    return np.array(of, dtype=np.int64)


def check_routes(samples: Sequence[Sample], *, replayed: bool) -> bool:
    """Whether the samples have routes. Raises ValueError as `pack` for routes."""
    traces = [s.routing for s in samples if s.routing is not None]
    if len(traces) not in (0, len(samples)):
        raise ValueError(
            f"{len(traces)} of {len(samples)} samples carry routing: routing replay needs it for all or none; "
            "check that every rollout server returns routed experts"
        )
    if traces:
        names = [s.name for s in samples]
        RoutingTrace.check_all(traces, [s.token_ids for s in samples], samples=names)
        if replayed:
            spans, masks = [s.versions for s in samples], [s.loss_mask for s in samples]
            check_all_versions([t.versions for t in traces], spans, masks, samples=names)
    return bool(traces)


def _loss_counts(flat: FlatColumns) -> Ints:
    """[samples]: the number of loss tokens of each."""
    total = np.concatenate(([0], np.cumsum(flat.loss_mask.numpy())))
    counts: Ints = total[flat.starts + flat.lengths] - total[flat.starts]
    return counts


def _filled(cell: Ints, flat: FlatColumns, made: Plan, traces: Sequence[RoutingTrace] | None) -> MicroBatch:
    if len(cell):
        routing = None if traces is None else RoutingTrace.concat([traces[i] for i in cell])
        return replace(flat.micro_batch(cell), routing=routing)
    row = torch.zeros(1, dtype=torch.int64)
    return replace(flat.filler(made.filler), routing=None if traces is None else take_rows(traces[made.filler], row))


def cut_shard(shard: Sequence[MicroBatch], part: ShardSpec) -> list[RankRoutes | None]:
    """The routes of each micro-batch that the ranks of `part` need. Raises ValueError as `cut_routes` does."""
    out: list[RankRoutes | None] = []
    for m in shard:
        assert not isinstance(m.routing, RankRoutes), "routes that were already cut for a rank cannot be cut again"
        out.append(None if m.routing is None else cut_routes(m.routing, m.samples, m.cu_seqlens, part))
    return out


def check_advantages(groups: Sequence[SampleGroup], advantages: Sequence[Sequence[float | Tensor | None]]) -> None:
    """Raises ValueError for advantages that do not match the groups or are not finite. None: they are elsewhere."""
    if len(groups) != len(advantages):
        raise ValueError(f"{len(groups)} groups, but {len(advantages)} lists of advantages: pass one list per group")
    for group, values in zip(groups, advantages, strict=True):
        if len(group.samples) != len(values):
            raise ValueError(
                f"group {group.prompt.id!r} has {len(group.samples)} samples, but {len(values)} advantages: pass "
                "one per sample"
            )
        for s, a in zip(group.samples, values, strict=True):
            if isinstance(a, Tensor) and a.shape != s.token_ids.shape:
                raise ValueError(
                    f"sample {s.name} has {len(s.token_ids)} tokens, but advantages of shape {list(a.shape)}: "
                    "pass a number, or one number per token"
                )
            if a is not None and not (bool(a.isfinite().all()) if isinstance(a, Tensor) else math.isfinite(a)):
                raise ValueError(
                    f"group {group.prompt.id!r} has non-finite advantages {list(values)}: check its rewards for nan"
                )


def names_of(samples: Sequence[Sample]) -> list[str]:
    """Their unique names in a batch: the samples' own, with "#2" after it for the second sample of a name (a prompt
    comes twice in a step where an epoch ends)."""
    seen: Counter[str] = Counter()
    out = []
    for s in samples:
        seen[s.name] += 1
        out.append(s.name if seen[s.name] == 1 else f"{s.name}#{seen[s.name]}")
    return out


def _matched(groups: Sequence[SampleGroup], advantages: Sequence[Sequence[A]]) -> tuple[list[Sample], list[A]]:
    check_advantages(groups, advantages)
    samples = [s for g in groups for s in g.samples]
    if not samples:
        raise ValueError(f"0 samples in {len(groups)} groups: expected at least 1")
    return samples, [a for values in advantages for a in values]

"""Packs groups and their advantages into one train batch. Tokens are shifted here and nowhere else.

Letters: S tokens a sample, N samples a micro-batch, T packed tokens, F tokens of all samples end to end, C candidates a
token.

The model's inputs are the first S-1 tokens of a sample; position t of the batch holds input token t and everything
about its label, token t+1. Samples are never split; with `together`, groups are not split either, because a loss over
pairs needs both samples in one micro-batch. A step satisfies three conditions:

* Every data-parallel row has the same number of micro-batches, since the ranks' collectives would hang otherwise: the
  number that first-fit-decreasing needs for the fullest row, rounded up to a multiple of `micro_multiple`.
* No micro-batch has more than `max_tokens` inputs, which bounds memory.
* Rows, and micro-batches within a row, have nearly equal load, for speed: costliest first into the least loaded. Load
  is the number of tokens, or `cost` of a sample's length (its FLOPs: attention makes long samples cost more per token).
  Where an even spread over a row's micro-batches would exceed `max_tokens`, the row keeps its first-fit result.

A grid cell without a sample (fewer samples than cells) holds one masked token, copied with its routing row from a real
sample, so that its rank has a valid input.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from miles_like.batch.aggregation import loss_weights
from miles_like.batch.bins import Cost, Ints, loads_of, micro_batches, ranges, spread, sums_of
from miles_like.types import Aggregation, MicroBatch, Sample, SampleGroup, TrainBatch
from routing_replay.align import ShardSpec, take_rows
from routing_replay.rank_routes import RankRoutes, cut_routes
from routing_replay.trace import RoutingTrace
from routing_replay.versions import check_all_versions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Flat:
    """All samples end to end, not yet shifted."""

    names: Sequence[str]  # [samples], unique
    tokens: Tensor  # [F] int64
    loss_mask: Tensor  # [F] bool
    logprobs: Tensor  # [F] fp32
    lengths: Ints  # [samples], S of each
    advantages: Tensor  # [F] fp32
    routing: Mapping[str, RoutingTrace] | None  # keyed by sample name, S-1 rows each
    prompts: Ints  # [samples], the number of each sample's prompt
    streams: Mapping[str, Tensor] = field(default_factory=dict)  # [F] or [F, C] fp32
    candidates: Tensor | None = None  # [F, C] int64
    weights: Tensor | None = None  # [F] fp32

    @property
    def starts(self) -> Ints:
        return np.concatenate(([0], np.cumsum(self.lengths)[:-1]))

    def loss_counts(self) -> Ints:
        """[samples]: the number of loss tokens of each."""
        total = np.concatenate(([0], np.cumsum(self.loss_mask.numpy())))
        counts: Ints = total[self.starts + self.lengths] - total[self.starts]
        return counts


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
    flat = _flattened(groups, advantages, replayed)
    flat = replace(flat, weights=loss_weights(flat.loss_counts(), flat.prompts, flat.lengths, aggregation, constant))
    versions = [span.version for g in groups for s in g.samples for span in s.versions] or [0]
    return _pack(
        flat,
        dp_size=dp_size,
        max_tokens=max_tokens,
        micro_multiple=micro_multiple,
        cost=cost,
        versions=(min(versions), max(versions)),
        units=flat.prompts if together else np.arange(len(flat.names)),
    )


def _flattened(groups: Sequence[SampleGroup], advantages: Sequence[Sequence[float | Tensor]], replayed: bool) -> _Flat:
    samples, flat_advantages = _matched(groups, advantages)
    traces = [s.routing for s in samples if s.routing is not None]
    if len(traces) not in (0, len(samples)):
        raise ValueError(
            f"{len(traces)} of {len(samples)} samples carry routing: routing replay needs it for all or none; "
            "check that every rollout server returns routed experts"
        )
    names = names_of(samples)
    if traces:
        sample_names = [s.name for s in samples]
        RoutingTrace.check_all(traces, [s.token_ids for s in samples], samples=sample_names)
        if replayed:
            spans, masks = [s.versions for s in samples], [s.loss_mask for s in samples]
            check_all_versions([t.versions for t in traces], spans, masks, samples=sample_names)
    return _Flat(
        names=names,
        tokens=torch.cat([s.token_ids for s in samples]),
        loss_mask=torch.cat([s.loss_mask for s in samples]),
        logprobs=torch.cat([s.logprobs for s in samples]).float(),
        lengths=np.array([len(s.token_ids) for s in samples], dtype=np.int64),
        advantages=_along_tokens(samples, flat_advantages),
        routing=dict(zip(names, traces, strict=True)) if traces else None,
        prompts=np.repeat(np.arange(len(groups)), [len(g.samples) for g in groups]),
        streams={name: torch.cat([s.streams[name] for s in samples]) for name in _streams(samples)},
        candidates=None if samples[0].candidates is None else _candidates(samples),
    )


def cut_shard(shard: Sequence[MicroBatch], part: ShardSpec) -> list[RankRoutes | None]:
    """The routes of each micro-batch that the ranks of `part` need. Raises ValueError as `cut_routes` does."""
    out: list[RankRoutes | None] = []
    for m in shard:
        assert not isinstance(m.routing, RankRoutes), "routes that were already cut for a rank cannot be cut again"
        out.append(None if m.routing is None else cut_routes(m.routing, m.samples, m.cu_seqlens, part))
    return out


def names_of(samples: Sequence[Sample]) -> list[str]:
    """Their unique names in a batch: "prompt_id/index", with "#2" after it for the second sample of that name (a prompt
    comes twice in a step where an epoch ends)."""
    seen: Counter[str] = Counter()
    out = []
    for s in samples:
        seen[s.name] += 1
        out.append(s.name if seen[s.name] == 1 else f"{s.name}#{seen[s.name]}")
    return out


def _along_tokens(samples: Sequence[Sample], values: Sequence[float | Tensor]) -> Tensor:
    """[F] fp32 from a number or an [S] tensor for each sample."""
    if not any(isinstance(v, Tensor) for v in values):
        lengths = [s.token_ids.shape[0] for s in samples]
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths))
    return torch.cat(
        [
            v.float() if isinstance(v, Tensor) else torch.full(s.token_ids.shape, v)
            for s, v in zip(samples, values, strict=True)
        ]
    )


def _streams(samples: Sequence[Sample]) -> list[str]:
    """Names of the streams. Raises ValueError where samples differ in them."""
    names = set(samples[0].streams)
    for s in samples:
        if set(s.streams) != names or (s.candidates is None) != (samples[0].candidates is None):
            raise ValueError(
                f"sample {s.name} has the streams {sorted(s.streams)}, but sample {samples[0].name} has "
                f"{sorted(names)}: all samples of a step need the same streams"
            )
    return sorted(names)


def _candidates(samples: Sequence[Sample]) -> Tensor:
    return torch.cat([s.candidates for s in samples if s.candidates is not None])


def _matched(
    groups: Sequence[SampleGroup], advantages: Sequence[Sequence[float | Tensor]]
) -> tuple[list[Sample], list[float | Tensor]]:
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
            if not (bool(a.isfinite().all()) if isinstance(a, Tensor) else math.isfinite(a)):
                raise ValueError(
                    f"group {group.prompt.id!r} has non-finite advantages {list(values)}: check its rewards for nan"
                )
    samples = [s for g in groups for s in g.samples]
    if not samples:
        raise ValueError(f"0 samples in {len(groups)} groups: expected at least 1")
    return samples, [a for values in advantages for a in values]


def _pack(
    flat: _Flat,
    *,
    dp_size: int,
    max_tokens: int,
    micro_multiple: int,
    cost: Cost | None,
    versions: tuple[int, int],
    units: Ints,  # [samples], ascending from 0: samples with the same number share a micro-batch
) -> TrainBatch:
    if dp_size < 1 or micro_multiple < 1:
        raise ValueError(f"dp_size {dp_size} and micro_multiple {micro_multiple} must be at least 1")
    counts, inputs = flat.loss_counts(), flat.lengths - 1
    if not counts.sum():
        raise ValueError(
            f"0 response tokens in {len(counts)} samples: there is nothing to train on; check the rollout servers"
        )
    kept = sums_of(units, counts) > 0  # [units]
    sizes, unit_inputs = np.bincount(units), sums_of(units, inputs)
    first = np.cumsum(sizes) - sizes  # the first sample of each unit
    longest = int(np.where(kept, unit_inputs, 0).argmax())
    if unit_inputs[longest] > max_tokens:
        name, n = flat.names[first[longest]], sizes[longest]
        what = f"sample {name} has" if n == 1 else f"the {n} samples of the group of {name} have"
        raise ValueError(
            f"{what} {unit_inputs[longest]} input tokens, but a micro-batch holds only {max_tokens}: raise "
            "train.max_tokens_per_rank or lower rollout.max_new_tokens"
        )
    loads = sums_of(units, loads_of(inputs, np.flatnonzero(kept[units]), cost))
    rows = spread(np.flatnonzero(kept), loads, bins=dp_size)
    cells = micro_batches(rows, unit_inputs, loads, max_tokens=max_tokens, multiple=micro_multiple)
    starts, dummy = flat.starts, int(first[kept.argmax()])

    def filled(cell: Ints) -> MicroBatch:
        """Longest first, so that attention needs no gather, then in the order given: sums over samples do not depend on
        how the bins were filled."""
        cell = cell[np.lexsort((cell, -unit_inputs[cell]))]
        return _micro_batch(flat, ranges(first[cell], sizes[cell]), starts)

    grid = tuple(tuple(filled(cell) if len(cell) else _dummy(flat, dummy, starts) for cell in row) for row in cells)
    return TrainBatch(grid=grid, loss_tokens=int(counts.sum()), versions=versions)


def _micro_batch(flat: _Flat, ids: Ints, starts: Ints) -> MicroBatch:
    n = flat.lengths[ids] - 1
    cu_seqlens = np.concatenate(([0], np.cumsum(n)))
    positions = ranges(np.zeros_like(n), n)
    at = torch.from_numpy(ranges(starts[ids], n))  # [T] index of each input in the flat streams
    names = tuple(flat.names[i] for i in ids)
    return MicroBatch(
        samples=names,
        tokens=flat.tokens[at],
        labels=flat.tokens[at + 1],
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens).to(torch.int32),
        loss_mask=flat.loss_mask[at + 1],
        advantages=flat.advantages[at + 1],
        rollout_logprobs=flat.logprobs[at + 1],
        routing=RoutingTrace.concat([flat.routing[name] for name in names]) if flat.routing is not None else None,
        weights=None if flat.weights is None else flat.weights[at + 1],
        streams={name: stream[at + 1] for name, stream in flat.streams.items()},
        candidates=None if flat.candidates is None else flat.candidates[at + 1],
    )


def _dummy(flat: _Flat, i: int, starts: Ints) -> MicroBatch:
    """The first input token of sample i, without loss."""
    token = flat.tokens[int(starts[i])].reshape(1)
    routing = None
    if flat.routing is not None:
        routing = take_rows(flat.routing[flat.names[i]], torch.zeros(1, dtype=torch.int64))
    return MicroBatch(
        samples=("",),
        tokens=token,
        labels=token.clone(),
        positions=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        loss_mask=torch.zeros(1, dtype=torch.bool),
        advantages=torch.zeros(1),
        rollout_logprobs=torch.zeros(1),
        routing=routing,
        weights=None if flat.weights is None else torch.zeros(1),
        streams={name: torch.zeros_like(stream[:1]) for name, stream in flat.streams.items()},
        candidates=None if flat.candidates is None else torch.zeros_like(flat.candidates[:1]),
    )

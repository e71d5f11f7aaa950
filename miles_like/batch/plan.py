"""Decides which samples form which micro-batch, from their lengths alone.

A step satisfies three conditions:

* Every data-parallel row has the same number of micro-batches, since the ranks' collectives would hang otherwise: the
  number that first-fit-decreasing needs for the fullest row, rounded up to a multiple of `micro_multiple`.
* No micro-batch has more than `max_tokens` inputs, which bounds memory.
* Rows, and micro-batches within a row, have nearly equal load, for speed: costliest first into the least loaded. Load
  is the number of tokens, or `cost` of a sample's length (its FLOPs: attention makes long samples cost more per token).
  Where an even spread over a row's micro-batches would exceed `max_tokens`, the row keeps its first-fit result.

Samples are never split; with `together`, groups are not split either, because a loss over pairs needs both samples in
one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miles_like.batch.aggregation import sample_weights
from miles_like.batch.bins import Cost, Floats, Ints, loads_of, micro_batches, ranges, spread, sums_of
from miles_like.records import PlannedMicroBatch
from miles_like.types import Aggregation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSamples:
    """What a plan is made from: the samples of a step, numbered 0, 1, ..."""

    names: Sequence[str]  # [samples], unique
    lengths: Ints  # [samples], tokens of each
    counts: Ints  # [samples], loss tokens of each
    prompts: Ints  # [samples], the number of each sample's prompt: 0, 1, ..., ascending
    episodes: Ints  # [samples], the number of each sample's episode in the step: 0, 1, ...
    versions: tuple[int, int]  # oldest and newest weight version of their tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """How samples are laid out: the arguments of `packing.pack` of these names."""

    dp_size: int
    max_tokens: int
    micro_multiple: int = 1
    cost: Cost | None = None
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant: int | None = None
    together: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The micro-batches of a step, as numbers of samples."""

    grid: Sequence[Sequence[Ints]]  # [dp][micro] samples in their order; empty: one masked token of `filler`
    filler: int  # sample whose first token fills an empty cell
    weights: Floats | None  # [samples]: factor of the losses of a sample's tokens; None: 1 each
    loss_tokens: int
    versions: tuple[int, int]


def plan(samples: StepSamples, how: PlanSettings) -> Plan:
    """Lays out one optimizer step. The same arguments give the same plan. Samples without a loss token are dropped.

    Raises ValueError for settings that are not positive, no loss token at all, and a sample, or a group with
    `together`, of more than `max_tokens` inputs.
    """
    weights = sample_weights(samples.counts, samples.prompts, samples.episodes, how.aggregation, how.constant)
    if how.dp_size < 1 or how.micro_multiple < 1:
        raise ValueError(f"dp_size {how.dp_size} and micro_multiple {how.micro_multiple} must be at least 1")
    counts, inputs = samples.counts, samples.lengths - 1
    if not counts.sum():
        raise ValueError(
            f"0 response tokens in {len(counts)} samples: there is nothing to train on; check the rollout servers"
        )
    # [samples], ascending from 0: samples with the same number share a micro-batch
    units = samples.prompts if how.together else np.arange(len(counts))
    kept = sums_of(units, counts) > 0  # [units]
    sizes, unit_inputs = np.bincount(units), sums_of(units, inputs)
    first = np.cumsum(sizes) - sizes  # the first sample of each unit
    longest = int(np.where(kept, unit_inputs, 0).argmax())
    if unit_inputs[longest] > how.max_tokens:
        name, n = samples.names[first[longest]], sizes[longest]
        what = f"sample {name} has" if n == 1 else f"the {n} samples of the group of {name} have"
        raise ValueError(
            f"{what} {unit_inputs[longest]} input tokens, but a micro-batch holds only {how.max_tokens}: raise "
            "train.max_tokens_per_rank or lower rollout.max_new_tokens"
        )
    loads = sums_of(units, loads_of(inputs, np.flatnonzero(kept[units]), how.cost))
    rows = spread(np.flatnonzero(kept), loads, bins=how.dp_size)
    cells = micro_batches(rows, unit_inputs, loads, max_tokens=how.max_tokens, multiple=how.micro_multiple)

    def ordered(cell: Ints) -> Ints:
        """Longest first, so that attention needs no gather, then in the order given: sums over samples do not depend on
        how the bins were filled."""
        cell = cell[np.lexsort((cell, -unit_inputs[cell]))]
        return ranges(first[cell], sizes[cell])

    return Plan(
        grid=[[ordered(cell) for cell in row] for row in cells],
        filler=int(first[kept.argmax()]),
        weights=weights,
        loss_tokens=int(counts.sum()),
        versions=samples.versions,
    )


def planned(
    made: Plan, names: Sequence[str], advantages: Sequence[float | None]
) -> tuple[tuple[PlannedMicroBatch, ...], ...]:
    """[dp][micro]: the micro-batches of a plan, as the ranks fill them. names, advantages: of each sample; None:
    as in PlannedMicroBatch."""

    def cell(ids: Ints) -> PlannedMicroBatch:
        whole = ids.tolist() or [made.filler]
        return PlannedMicroBatch(
            samples=tuple(names[i] for i in whole),
            advantages=tuple(advantages[i] for i in whole),
            weights=None if made.weights is None else tuple(made.weights[whole].tolist()),
            filler=not len(ids),
        )

    return tuple(tuple(cell(ids) for ids in row) for row in made.grid)

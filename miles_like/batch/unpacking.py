"""Splits the trainer's values of a batch's tokens into one stream per sample: the inverse of packing.

Letters: S tokens a sample, T packed tokens, C values a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from miles_like.batch.packing import names_of
from miles_like.types import MicroBatch, SampleGroup, SharedExperts, TrainBatch

Grid = Sequence[Sequence[Tensor]]  # [dp][micro] of [T] or [T, C], of labels


def unpack(grid: Sequence[Sequence[MicroBatch]], values: Grid) -> dict[str, Tensor]:
    """Sample name -> [S] (or [S, C]): the value at position t of a micro-batch belongs to token t+1; 0 for the first
    token and where the loss mask is false. Samples that `pack` dropped have no entry."""
    out: dict[str, Tensor] = {}
    for row, row_values in zip(grid, values, strict=True):
        for micro, label_values in zip(row, row_values, strict=True):
            assert len(label_values) == len(micro.tokens), (len(label_values), len(micro.tokens))
            loss_mask = micro.loss_mask.view(-1, *(1 for _ in label_values.shape[1:]))
            kept = torch.where(loss_mask, label_values.to(micro.loss_mask.device), 0)
            # a row of zeros before the whole pack: the value of a sample's first token is the row before its own
            shifted = torch.cat([kept.new_zeros(1, *kept.shape[1:]), kept])
            ends = micro.cu_seqlens.tolist()
            for name, a, b in zip(micro.samples, ends, ends[1:], strict=False):
                if name:
                    out[name] = stream = shifted[a : b + 1].clone()
                    stream[0] = 0
    return out


def streams_of(groups: Sequence[SampleGroup], batch: TrainBatch, values: Grid) -> list[list[Tensor]]:
    """For each group, [S] (or [S, C]) of each of its samples in their order; `batch` is what `pack` made of these
    groups. Zeros for a sample without a loss token, which no batch holds."""
    found = unpack(batch.grid, values)
    width, dtype = values[0][0].shape[1:], values[0][0].dtype
    names = iter(names_of([s for g in groups for s in g.samples]))
    out = [
        [
            found.pop(name) if (name := next(names)) in found else torch.zeros(len(s.token_ids), *width, dtype=dtype)
            for s in g.samples
        ]
        for g in groups
    ]
    assert not found, f"samples of other groups: {sorted(found)[:3]}"
    return out


def summed(of_ranks: Sequence[Sequence[Mapping[str, SharedExperts]]]) -> list[dict[str, SharedExperts]]:
    """Each optimizer step's routes by sample, over the rows and layers of all ranks: `StepReport.agreement` of each."""
    out: list[dict[str, SharedExperts]] = []
    for of_step in zip(*of_ranks, strict=True):
        total: dict[str, SharedExperts] = {}
        for own in of_step:
            for name, (shared, recorded) in own.items():
                before = total.get(name, SharedExperts(0, 0))
                total[name] = SharedExperts(before.shared + shared, before.recorded + recorded)
        out.append(total)
    return out


def shares_of(
    groups: Sequence[SampleGroup], agreement: Sequence[Mapping[str, SharedExperts]]
) -> list[list[float | None]]:
    """For each group, of each of its samples the share of its recorded experts that the trainer's routers choose too;
    None where it is not measured. agreement: of each optimizer step, which trained as many groups as the others."""
    out: list[list[float | None]] = [[None] * len(g.samples) for g in groups]
    n = len(groups) // len(agreement) if agreement else 0
    for i, of_step in enumerate(agreement):
        own = range(i * n, (i + 1) * n)
        names = iter(names_of([s for g in own for s in groups[g].samples]))
        for g in own:
            found = [of_step.get(next(names)) for _ in groups[g].samples]
            out[g] = [None if of is None else of.shared / of.recorded for of in found]
    return out

"""The baseline of KTO: how far the policy is from the reference, measured on answers to other prompts.

Letters: S tokens a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from miles_like.batch.packer import Packer
from miles_like.batch.unpacking import Grid, streams_of
from miles_like.protocols import Trainer
from miles_like.types import KL_BASELINE, REFERENCE, Sample, SampleGroup, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchedKl:
    """z = max(0, mean of the sum over tokens of (log p - log p_ref)) over all examples of a batch, each with the answer
    of the row before it in the batch (the first with the last's): an estimate of KL(policy || reference), as in the
    KTO paper (arXiv:2402.01306, 4.2) and in trl. Two forward passes."""

    trainer: Trainer
    packer: Packer

    async def add(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        """The groups with the stream KL_BASELINE, z at each token. Raises RuntimeError when a rank fails."""
        asked = mismatched(groups, self.packer.max_tokens)
        batch = replace(self.packer, cost=None).batch(asked)
        policy = _sums(asked, batch, await self.trainer.logprobs(batch))
        reference = _sums(asked, batch, await self.trainer.logprobs(batch, weights=REFERENCE))
        z = float((policy - reference).mean().clamp(min=0))
        return [replace(g, samples=tuple(_with_baseline(s, z) for s in g.samples)) for g in groups]


def mismatched(groups: Sequence[SampleGroup], max_tokens: int) -> list[SampleGroup]:
    """Each sample with the answer of the sample of the same index in the group before (of its last one if there are
    fewer), cut where the sample would have more than `max_tokens` input tokens."""
    return [
        replace(
            g,
            samples=tuple(
                _joined(s, before.samples[min(i, len(before.samples) - 1)], max_tokens) for i, s in enumerate(g.samples)
            ),
        )
        for before, g in zip([groups[-1], *groups], groups, strict=False)
    ]


def _joined(sample: Sample, other: Sample, max_tokens: int) -> Sample:
    begin, start = (int(s.loss_mask.int().argmax()) for s in (sample, other))
    tokens = torch.cat([sample.token_ids[:begin], other.token_ids[start:]])[: max_tokens + 1]
    mask = torch.cat([sample.loss_mask[:begin], other.loss_mask[start:]])[: max_tokens + 1]
    return replace(sample, token_ids=tokens, loss_mask=mask, logprobs=torch.zeros(len(tokens)), streams={})


def _sums(groups: Sequence[SampleGroup], batch: TrainBatch, values: Grid) -> torch.Tensor:
    """[samples] fp64."""
    streams = streams_of(groups, batch, values)
    return torch.stack([stream.double().sum() for of_group in streams for stream in of_group])


def _with_baseline(sample: Sample, z: float) -> Sample:
    return replace(sample, streams={**sample.streams, KL_BASELINE: torch.full((len(sample.token_ids),), z)})

"""All loss tokens of a rollout as one flat stream, and sums along each sample.

Letters: S tokens a sample, F tokens of all samples end to end, R of them loss tokens. A sample's next token is its next
loss token: an environment's tokens, which the policy did not choose, are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from miles_like.algorithms.advantages.rewards import finite_rewards, per_sample
from miles_like.types import SampleGroup

WHITEN_EPS = 1e-8  # verl's and trl's, inside the square root


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """The loss tokens of all samples of a rollout, end to end."""

    groups: Sequence[SampleGroup]
    lengths: list[int]  # [samples], S of each
    mask: Tensor  # [F] bool
    owners: Tensor  # [R] int64, the index of each token's sample
    counts: Tensor  # [samples] int64, R of each

    @classmethod
    def of(cls, groups: Sequence[SampleGroup]) -> Tokens:
        samples = [s for g in groups for s in g.samples]
        lengths = [s.token_ids.shape[0] for s in samples]
        mask = torch.cat([s.loss_mask for s in samples]) if samples else torch.zeros(0, dtype=torch.bool)
        all_owners = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths, dtype=torch.int64))
        owners = all_owners[mask]
        counts = torch.bincount(owners, minlength=len(samples))
        return cls(groups=groups, lengths=lengths, mask=mask, owners=owners, counts=counts)

    def stream(self, name: str) -> Tensor:
        """[R] fp64 of the samples' streams `name`. Raises ValueError for a sample without it."""
        samples = [s for g in self.groups for s in g.samples]
        for s in samples:
            if name not in s.streams:
                raise ValueError(
                    f"sample {s.name} has no stream {name!r}, only {sorted(s.streams)}: score the sample first"
                )
        return self._chosen([s.streams[name] for s in samples])

    def logprobs(self) -> Tensor:
        """[R] fp64 log-probabilities that the rollout reported."""
        return self._chosen([s.logprobs for g in self.groups for s in g.samples])

    def last_rewards(self) -> Tensor:
        """[R] fp64: each sample's reward at its last token, 0 elsewhere; each row of an episode has the episode's.
        Raises ValueError as `finite_rewards`."""
        of_samples = [r for g in self.groups for r in per_sample(g, finite_rewards(g))]
        rewards = torch.tensor(of_samples, dtype=torch.float64)
        out = torch.zeros(len(self.owners), dtype=torch.float64)
        some = self.counts > 0
        out[self.counts.cumsum(0)[some] - 1] = rewards[some]
        return out

    def discounted(self, values: Tensor, factor: float) -> Tensor:
        """[R] y_t = x_t + factor y_{t+1} along each sample, in log2(length) passes."""
        out, shift, longest = values, 1, int(self.counts.max()) if len(self.counts) else 0
        while shift < longest:
            ahead = torch.where(self.owners[:-shift] == self.owners[shift:], out[shift:], 0.0)
            out = torch.cat([out[:-shift] + factor * ahead, out[-shift:]])
            shift, factor = 2 * shift, factor * factor
        return out

    def following(self, values: Tensor) -> Tensor:
        """[R]: for each token the value of the sample's next one, 0 for the last."""
        ahead = torch.zeros_like(values)
        ahead[:-1] = torch.where(self.owners[:-1] == self.owners[1:], values[1:], 0.0)
        return ahead

    def per_sample(self, values: Tensor) -> Tensor:
        """[R] -> [samples] sums."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.owners, values)

    def moments(self, values: Tensor) -> list[list[Moments]]:
        """[R] -> for each group [G]."""
        counts, totals = self.counts.double(), self.per_sample(values)
        spreads = self.per_sample((values - (totals / counts.clamp(min=1))[self.owners]).square())
        found = iter([Moments(*m) for m in zip(counts.tolist(), totals.tolist(), spreads.tolist(), strict=True)])
        return [[next(found) for _ in g.samples] for g in self.groups]

    def by_sample(self, values: Tensor, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
        """[R] -> for each group [G] of [S] of `dtype`, 0 outside the loss mask."""
        flat = torch.zeros(len(self.mask), dtype=dtype)
        flat[self.mask] = values.to(dtype)
        parts = iter(torch.split(flat, self.lengths)) if self.lengths else iter(())
        return [[next(parts) for _ in g.samples] for g in self.groups]

    def _chosen(self, streams: list[Tensor]) -> Tensor:
        return torch.cat(streams)[self.mask].double() if streams else torch.zeros(0, dtype=torch.float64)


class Moments(NamedTuple):
    """Of the values of a sample's loss tokens."""

    tokens: float
    total: float
    spread: float  # sum of squares about their mean


class Whitening(NamedTuple):
    """Minus the mean, divided by the (n - 1) standard deviation, of all values of a rollout."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, moments: Sequence[Moments]) -> Whitening:
        """From those of all samples; which of them are measured together, and their order, changes no bit. Of a single
        value it makes zero."""
        some = [m for m in moments if m.tokens]
        n = sum(m.tokens for m in some)
        mean = math.fsum(m.total for m in some) / max(n, 1)
        apart = [m.tokens * (m.total / m.tokens - mean) ** 2 for m in some]
        spread = math.fsum([*apart, *(m.spread for m in some)])
        return cls(mean, math.sqrt(spread / max(n - 1, 1) + WHITEN_EPS))

    def of_values(self, values: Tensor) -> Tensor:
        """[R] fp64"""
        return (values - self.mean) / self.deviation

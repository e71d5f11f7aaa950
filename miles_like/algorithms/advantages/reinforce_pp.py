"""REINFORCE++: returns of tokens, and its form with the group's mean as baseline, normalized over the whole rollout.

Letters: G samples a prompt, R loss tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from miles_like.algorithms.advantages.grpo import group_relative
from miles_like.algorithms.advantages.parts import OfTokens
from miles_like.algorithms.advantages.penalty import KlPenalty, token_rewards
from miles_like.algorithms.advantages.rewards import relative_to_group
from miles_like.algorithms.advantages.tokens import WHITEN_EPS, Tokens
from miles_like.types import SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlus(OfTokens):
    """The return of a token is the sample's reward, at its last token, minus the KL penalties of this token and those
    after it, discounted by `gamma`; returns are whitened over all loss tokens of the rollout (REINFORCE++,
    arXiv:2501.03262)."""

    gamma: float
    penalty: KlPenalty | None

    def estimate(self, tokens: Tokens) -> Tensor:
        """[R] fp64; raises ValueError for a reward that is missing or not finite, and for a sample without the stream
        that the penalty needs."""
        return tokens.discounted(token_rewards(tokens, self.penalty), self.gamma)


def whitened_baseline(groups: Sequence[SampleGroup]) -> list[list[float]]:
    """For each group [G]: r - mean over the group, whitened with the mean and (n - 1) standard deviation over all loss
    tokens of the rollout (REINFORCE++ with baseline, arXiv:2501.03262; verl's reinforce_plus_plus_baseline): a sample
    counts in both as often as it has tokens.

    Raises ValueError for a reward that is missing or not finite.
    """
    centred = relative_to_group(groups, partial(group_relative, normalize_std=False))
    values = torch.tensor([a for group in centred for a in group], dtype=torch.float64)
    times = torch.tensor([s.response_len for g in groups for s in g.samples], dtype=torch.float64)
    if (n := times.sum()) > 1:
        values = values - (times * values).sum() / n
        values = values / ((times * values.square()).sum() / (n - 1) + WHITEN_EPS).sqrt()
    out = iter(values.tolist())
    return [[next(out) for _ in group] for group in centred]

"""REINFORCE++: returns of tokens, normalized over the whole rollout.

Letters: S tokens a sample, R loss tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from miles_like.algorithms.advantages.penalty import KlPenalty, token_rewards
from miles_like.algorithms.advantages.tokens import Tokens, whiten
from miles_like.types import SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlus:
    """The return of a token is the sample's reward, at its last token, minus the KL penalties of this token and those
    after it, discounted by `gamma`; returns are whitened over all loss tokens of the rollout (REINFORCE++,
    arXiv:2501.03262)."""

    gamma: float
    penalty: KlPenalty | None

    def __call__(self, groups: Sequence[SampleGroup]) -> list[list[Tensor]]:
        """For each group [G] of [S] fp32; raises ValueError for a reward that is missing or not finite, and for a
        sample without the stream that the penalty needs."""
        tokens = Tokens.of(groups)
        return tokens.by_sample(whiten(tokens.discounted(token_rewards(tokens, self.penalty), self.gamma)))

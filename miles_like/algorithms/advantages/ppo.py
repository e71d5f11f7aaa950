"""Generalized advantage estimation from a critic's values.

Letters: S tokens a sample, R loss tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from miles_like.algorithms.advantages.parts import OfTokens
from miles_like.algorithms.advantages.penalty import KlPenalty, token_rewards
from miles_like.algorithms.advantages.tokens import Tokens
from miles_like.types import VALUES, SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Gae(OfTokens):
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t (GAE, arXiv:1506.02438
    eq. 16), then whitened over all loss tokens of the rollout, as in common PPO implementations.

    V is the sample's stream VALUES, before the token was chosen. r is the reward, at the sample's last token, minus the
    tokens' KL penalties. V after the last token is 0, also for a sample that was cut at the token limit.
    """

    gamma: float
    gae_lambda: float
    penalty: KlPenalty | None

    def returns(self, groups: Sequence[SampleGroup]) -> list[list[Tensor]]:
        """The critic's targets, A_t + V_t with A before whitening (TD(lambda)): for each group [G] of [S] fp32. Raises
        as `estimate`."""
        tokens = Tokens.of(groups)
        return tokens.by_sample(self.estimate(tokens) + tokens.stream(VALUES))

    def estimate(self, tokens: Tokens) -> Tensor:
        """[R] fp64; raises ValueError for a reward that is missing or not finite, and for a sample without a needed
        stream."""
        values = tokens.stream(VALUES)
        deltas = token_rewards(tokens, self.penalty) + self.gamma * tokens.following(values) - values
        return tokens.discounted(deltas, self.gamma * self.gae_lambda)

"""The KL penalty in the reward.

Letters: G samples a prompt, R loss tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from miles_like.algorithms.advantages.parts import InParts, OfSamples, Placed
from miles_like.algorithms.advantages.rewards import finite_rewards, per_sample
from miles_like.algorithms.advantages.tokens import Tokens
from miles_like.algorithms.terms.kl import Estimator, kl_estimate
from miles_like.protocols import AdvantageFn, Numbers
from miles_like.types import REFERENCE, SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPenalty:
    """`coefficient` times an estimate of KL(rollout || reference) at each token (kl.py), from the rollout's own
    log-probabilities and the stream REFERENCE. With k1 this is the reward of InstructGPT (arXiv:2203.02155 eq. 2)."""

    coefficient: float
    estimator: Estimator
    log_ratio_clamp: float | None = None
    k3_clamp: float | None = None

    def per_token(self, tokens: Tokens) -> Tensor:
        """[R] fp64; raises ValueError for a sample without the stream."""
        above = tokens.stream(REFERENCE) - tokens.logprobs()
        clamps = {"log_ratio_clamp": self.log_ratio_clamp, "k3_clamp": self.k3_clamp}
        return self.coefficient * kl_estimate(above, self.estimator, **clamps)


def token_rewards(tokens: Tokens, penalty: KlPenalty | None) -> Tensor:
    """[R] fp64: each sample's reward at its last token, minus the penalty of every token."""
    rewards = tokens.last_rewards()
    return rewards if penalty is None else rewards - penalty.per_token(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalized(InParts):
    """Sample-level advantages of rewards minus the sum of the token penalties, as in trl's RLOO and verl."""

    advantage: AdvantageFn
    penalty: KlPenalty
    places: ClassVar[bool] = False

    def measure(self, groups: Sequence[SampleGroup]) -> tuple[Sequence[SampleGroup], Sequence[Sequence[Numbers]]]:
        """The sum of each sample's penalties, in reward units."""
        tokens = Tokens.of(groups)
        sums = iter(tokens.per_sample(self.penalty.per_token(tokens)).tolist())
        return groups, [[(next(sums),) for _ in g.samples] for g in groups]

    def decide(
        self, groups: Sequence[SampleGroup], numbers: Sequence[Sequence[Numbers]]
    ) -> Sequence[Sequence[Numbers]]:
        return OfSamples(self.advantage).decide(_reduced(groups, numbers), [])

    def place(self, groups: Sequence[SampleGroup], decided: Sequence[Sequence[Numbers]]) -> Placed:
        return OfSamples(self.advantage).place(groups, decided)

    def __call__(self, groups: Sequence[SampleGroup]) -> Placed:
        """Also of a user's `advantage`, which may give [S] a sample."""
        return self.advantage(_reduced(*self.measure(groups)))


def _reduced(groups: Sequence[SampleGroup], penalties: Sequence[Sequence[Numbers]]) -> list[SampleGroup]:
    """The rewards less the penalties of the whole episodes."""
    out = []
    for group, of_group in zip(groups, penalties, strict=True):
        sums = dict.fromkeys((s.index for s in group.samples), 0.0)
        for s, (penalty,) in zip(group.samples, of_group, strict=True):
            sums[s.index] += penalty
        rewards = per_sample(group, finite_rewards(group))
        samples = zip(group.samples, rewards, strict=True)
        out.append(replace(group, samples=tuple(replace(s, reward=r - sums[s.index]) for s, r in samples)))
    return out

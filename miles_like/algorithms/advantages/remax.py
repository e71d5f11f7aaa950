"""ReMax: the reward of a greedy answer as the baseline.

Letters: R loss tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from miles_like.algorithms.advantages.parts import OfTokens
from miles_like.algorithms.advantages.penalty import KlPenalty, token_rewards
from miles_like.algorithms.advantages.rewards import finite_rewards
from miles_like.algorithms.advantages.tokens import Tokens
from miles_like.types import Sample, SampleGroup

GREEDY_INDEX = 0  # of the sample that rollout/episodes/greedy.py samples at temperature 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Remax(OfTokens):
    """The reward of a sample minus that of the greedy answer to its prompt (ReMax, arXiv:2310.10505, algorithm 1); with
    a penalty each token has the sum of its reward and the later tokens', of which the last has the sample's.

    The greedy answer is the sample of index 0, which has no loss token here (`without_loss`) and no penalty.
    """

    penalty: KlPenalty | None
    whitened: ClassVar[bool] = False

    def estimate(self, tokens: Tokens) -> Tensor:
        """[R] fp64; raises ValueError for a reward that is missing or not finite, for a group without a greedy answer,
        and for a sample without the stream that the penalty needs."""
        returns = tokens.discounted(token_rewards(tokens, self.penalty), 1.0)
        baselines = [b for g in tokens.groups for b in [_baseline(g)] * len(g.samples)]
        return returns - torch.tensor(baselines, dtype=torch.float64)[tokens.owners]


def without_loss(groups: Sequence[SampleGroup]) -> list[SampleGroup]:
    """The groups with an empty loss mask in their greedy answers."""
    return [replace(g, samples=tuple(_masked(s) for s in g.samples)) for g in groups]


def without_greedy(groups: Sequence[SampleGroup]) -> tuple[list[SampleGroup], list[float]]:
    """The groups without their greedy answers, and the rewards of those. Raises ValueError as `finite_rewards`."""
    kept = [replace(g, samples=tuple(s for s in g.samples if s.index != GREEDY_INDEX)) for g in groups]
    return kept, [_baseline(g) for g in groups]


def why_no_baseline(group: SampleGroup) -> str | None:
    """Why a scored group cannot be trained on with a greedy baseline; None: it can."""
    indices = {s.index for s in group.samples}
    if GREEDY_INDEX not in indices:
        return "its greedy answer has no score"
    return "no sampled answer has a score" if len(indices) == 1 else None


def _baseline(group: SampleGroup) -> float:
    rewards = finite_rewards(group)
    found = [r for s, r in zip(group.episodes, rewards, strict=True) if s.index == GREEDY_INDEX]
    if rewards and not found:
        raise ValueError(
            f"prompt {group.prompt.id!r} has no sample of index {GREEDY_INDEX}, whose reward is the baseline of "
            "algorithm.advantage = 'remax': discard the group"
        )
    return found[0] if found else 0.0


def _masked(sample: Sample) -> Sample:
    return sample.without_loss() if sample.index == GREEDY_INDEX else sample

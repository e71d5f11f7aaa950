"""A custom advantage: the sample's rank in its group, from -1 (worst) to 1 (best).

    [algorithm]
    advantage = "./advantage.py:rank"   # relative to the configuration; or, installed, my_package.objectives:rank

Ranks do not depend on the reward's scale, and one sample far above the others does not dominate them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from miles_like.protocols import AdvantageFn
from miles_like.types import SampleGroup


def rank(groups: Sequence[SampleGroup]) -> Sequence[Sequence[float | Tensor]]:
    """Protocol: AdvantageFn. All scored groups of a rollout -> for each group one number per sample, in order.

    A number applies to all tokens of its sample; a tensor [S] fp32, prompt included, gives one value per token.
    `group.rewards` raises ValueError for a sample without a reward. A group may have fewer than G samples.
    """
    return [_ranks(group.rewards) for group in groups]


def _ranks(rewards: Sequence[float]) -> list[float | Tensor]:
    """[G]: the share of the other samples with a lower reward minus the share with a higher one; 0 if all are equal."""
    others = max(1, len(rewards) - 1)
    return [sum((r > x) - (r < x) for x in rewards) / others for r in rewards]


_: AdvantageFn = rank  # mypy holds it to its Protocol here

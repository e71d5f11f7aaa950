"""An advantage of one's own: how the sample ranks in its group, from -1 (worst) to 1 (best).

    [algorithm]
    advantage = "./advantage.py:rank"   # relative to the configuration; or, installed, my_package.objectives:rank

Ranks do not depend on the reward's scale, and one sample that is far better than the others does not drown them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from miles_like.protocols import AdvantageFn
from miles_like.types import SampleGroup


def rank(groups: Sequence[SampleGroup]) -> Sequence[Sequence[float | Tensor]]:
    """Protocol: AdvantageFn. All scored groups of a rollout -> a number a sample, in their order.

    A number stands for all tokens of its sample; a tensor [S] fp32 over all its tokens, the prompt's too, gives each
    its own. `group.rewards` raises for a sample that was not scored. Samples of one group may be fewer than G.
    """
    return [_ranks(group.rewards) for group in groups]


def _ranks(rewards: Sequence[float]) -> list[float | Tensor]:
    """[G]: the share of others that are worse, less the share that are better; 0 where all are alike."""
    others = max(1, len(rewards) - 1)
    return [sum((r > x) - (r < x) for x in rewards) / others for r in rewards]


_: AdvantageFn = rank  # mypy holds it to its Protocol here

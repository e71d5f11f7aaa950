"""A control experiment: shuffled advantages.

Letters: G samples a prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from miles_like.algorithms.advantages.rewards import per_sample
from miles_like.types import SampleGroup


def shuffle_over_batch(
    groups: Sequence[SampleGroup], advantages: Sequence[Sequence[float | Tensor | None]], *, seed: int
) -> list[list[float]]:
    """The advantages, shuffled over all episodes of the batch: a control experiment whose gradient is noise.

    Groups keep their sizes. The result depends only on the seed: give a different one each step. Raises ValueError for
    token-level advantages, which cannot be moved to a sample of another length.
    """
    pairs = [(s, a) for g, of in zip(groups, advantages, strict=True) for s, a in zip(g.samples, of, strict=True)]
    values = [_number(a) for s, a in pairs if not s.row]
    random.Random(seed).shuffle(values)
    shuffled = iter(values)
    return [per_sample(g, [next(shuffled) for _ in g.episodes]) for g in groups]


def _number(advantage: float | Tensor | None) -> float:
    if advantage is None or isinstance(advantage, Tensor):
        raise ValueError(
            "token-level advantages cannot be shuffled over samples of different lengths: set "
            "algorithm.shuffle_advantages = false, or algorithm.advantage to a sample-level one"
        )
    return advantage

"""A control experiment: shuffled advantages.

Letters: G samples a prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor


def shuffle_over_batch(advantages: Sequence[Sequence[float | Tensor | None]], *, seed: int) -> list[list[float]]:
    """The advantages, shuffled over all samples of the batch: a control experiment whose gradient is noise.

    Groups keep their sizes. The result depends only on the seed: give a different one each step. Raises ValueError for
    token-level advantages, which cannot be moved to a sample of another length.
    """
    values = [_number(a) for group in advantages for a in group]
    random.Random(seed).shuffle(values)
    shuffled = iter(values)
    return [[next(shuffled) for _ in group] for group in advantages]


def _number(advantage: float | Tensor | None) -> float:
    if advantage is None or isinstance(advantage, Tensor):
        raise ValueError(
            "token-level advantages cannot be shuffled over samples of different lengths: set "
            "algorithm.shuffle_advantages = false, or algorithm.advantage to a sample-level one"
        )
    return advantage

"""A control: advantages dealt out at random.

Letters: G samples a prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor


def shuffle_over_batch(advantages: Sequence[Sequence[float | Tensor]], *, seed: int) -> list[list[float]]:
    """The same advantages dealt out at random over all samples of the batch: a control whose gradient is noise.

    Groups keep their sizes; the same seed deals the same way. Give a different seed each step. Raises ValueError for
    advantages of tokens, which belong to their places.
    """
    values = [_number(a) for group in advantages for a in group]
    random.Random(seed).shuffle(values)
    dealt = iter(values)
    return [[next(dealt) for _ in group] for group in advantages]


def _number(advantage: float | Tensor) -> float:
    if isinstance(advantage, Tensor):
        raise ValueError(
            f"advantages of tokens, here of {len(advantage)}, cannot be dealt out over samples of other lengths: set "
            "algorithm.shuffle_advantages = false, or algorithm.advantage to one of samples"
        )
    return advantage

"""Loss aggregation as one weight per token.

The trainer sums the token losses of a step and divides once, by the number of loss tokens in the whole step. Weights
computed before packing therefore give every aggregation in every layout.
"""

from __future__ import annotations

import numpy as np

from miles_like.batch.bins import Floats, Ints
from miles_like.types import Aggregation


def sample_weights(
    counts: Ints, prompts: Ints, episodes: Ints, aggregation: Aggregation, constant: int | None = None
) -> Floats | None:
    """The factor of the losses of each sample's tokens, [samples] fp64: the weighted sum divided by the number of loss
    tokens is what `aggregation` defines. None: every factor is 1.

    `counts`, `prompts`, `episodes` [samples]: loss tokens of each sample, number of its prompt and of its episode. What
    `aggregation` defines of samples is of whole episodes, whatever rows they have; those without a loss token do not
    count. Raises ValueError for CONSTANT without a positive `constant`.
    """
    if aggregation is Aggregation.TOKEN_MEAN:
        return None
    total, of_episodes = counts.sum(), np.bincount(episodes, weights=counts)
    kept = of_episodes > 0
    if aggregation is Aggregation.PROMPT_MEAN:
        prompt_counts = np.bincount(prompts, weights=counts)
        weights: Floats = total / (np.maximum(prompt_counts, 1)[prompts] * max((prompt_counts > 0).sum(), 1))
    elif aggregation is Aggregation.CONSTANT:
        if constant is None or constant < 1:
            raise ValueError(f"aggregation 'constant' divides by {constant} tokens: use a constant of at least 1")
        weights = np.full(len(counts), total / (kept.sum() * constant))
    else:
        divisors = of_episodes[episodes] if aggregation is Aggregation.SEQUENCE_MEAN else np.ones(len(counts))
        weights = total / (np.maximum(divisors, 1) * max(kept.sum(), 1))
    return weights

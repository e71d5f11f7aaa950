"""How the losses of a step's tokens become one number, said as a weight for each token.

The trainer adds losses up and divides the sum once, by the number of tokens under loss in the whole step. Weights that
are made before anything is packed therefore give every aggregation in every layout.

Letters: F tokens of all samples end to end.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from miles_like.bins import Ints
from miles_like.types import Aggregation


def loss_weights(
    counts: Ints, prompts: Ints, lengths: Ints, aggregation: Aggregation, constant: int | None = None
) -> Tensor | None:
    """What each token's loss is multiplied by, so that their sum over the number of tokens under loss is what
    `aggregation` defines: [F] fp32 for samples with `counts` tokens under loss, of `prompts`, `lengths` tokens each;
    None: 1 each. Samples without a token under loss are not counted. Raises ValueError for CONSTANT without one.
    """
    if aggregation is Aggregation.TOKEN_MEAN:
        return None
    total, kept = counts.sum(), counts > 0
    if aggregation is Aggregation.PROMPT_MEAN:
        of_prompt = np.bincount(prompts, weights=counts)
        of_sample = total / (np.maximum(of_prompt, 1)[prompts] * max((of_prompt > 0).sum(), 1))
    elif aggregation is Aggregation.CONSTANT:
        if constant is None or constant < 1:
            raise ValueError(f"aggregation 'constant' divides by {constant} tokens: give it at least 1")
        of_sample = np.full(len(counts), total / (kept.sum() * constant))
    else:
        own = counts if aggregation is Aggregation.SEQUENCE_MEAN else np.ones(len(counts))
        of_sample = total / (np.maximum(own, 1) * max(kept.sum(), 1))
    return torch.from_numpy(np.repeat(of_sample, lengths)).float()

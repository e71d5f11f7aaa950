"""How far two routings agree.

Letters: rows, K experts a token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def topk_agreement(a: Tensor, b: Tensor) -> Tensor:
    """[rows] bool: whether row i of `a` and of `b` [rows, K] are the same set of experts, in whatever order.

    Ids may be of different integer types. Raises ValueError when the shapes differ.
    """
    if a.shape != b.shape or a.ndim != 2:
        raise ValueError(f"routes {tuple(a.shape)} and {tuple(b.shape)} cannot be compared row by row")
    return (a.to(torch.int32).sort(-1).values == b.to(torch.int32).sort(-1).values).all(-1)

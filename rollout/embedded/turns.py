"""Which running samples are given a token in a step, so that a request of many samples does not slow one of few.

The time of a step grows with its rows. Without turns a request of 64 samples would make each token of everybody else's
as slow as its own; with them it takes longer itself.

Letters: B running samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEP_ROWS = 32  # which requests of different sizes share; about where a step's time becomes proportional to its rows


def in_turn(
    requests: NDArray[np.int64], asked: NDArray[np.int64], sampled: NDArray[np.int64], *, rows: int = STEP_ROWS
) -> NDArray[np.int64]:
    """Places in [0, B) of the samples whose turn it is, ascending.

    Each request has as many as its part of `rows`, or as the smallest of the requests asked for altogether where that
    is more; so requests of one size run whole, and so does one that is alone. Of its samples those come first that
    have the fewest tokens.

    Args:
        requests: [B], which request a sample belongs to.
        asked: [B], samples of that request in all.
        sampled: [B], tokens that each sample has.
    """
    if len(requests) <= rows:
        return np.arange(len(requests))
    names, mine, running = np.unique(requests, return_inverse=True, return_counts=True)
    share = max(rows // len(names), int(asked.min()), 1)
    if len(names) < 2 or running.max() <= share:
        return np.arange(len(requests))
    order = np.lexsort((sampled, mine))
    place = np.arange(len(order)) - (np.cumsum(running) - running)[mine[order]]  # among the samples of its request
    return np.sort(order[place < share])

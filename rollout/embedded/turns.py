"""Which running samples are given a token in a step, so that a request of many samples does not slow one of few.

The time of a step grows with its rows. Without turns a request of 64 samples slows every token of the other
requests to its own pace. With turns the large request takes more steps, at most four times as many.

Letters: B running samples, R requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEP_ROWS = 32  # that requests of different sizes share; up to about here a row costs little beside the step itself
_ALIKE = 2  # requests whose sizes differ by no more than this factor run whole
_SLOWEST = 4  # a request is given a token of each sample in so many steps at most

Ints = NDArray[np.int64]


def in_turn(requests: Ints, asked: Ints, sampled: Ints, *, rows: int = STEP_ROWS) -> Ints:
    """Places in [0, B) of the samples whose turn it is, ascending. Of a request those come first that have the fewest
    tokens; how many, `quotas` says.

    Args:
        requests: [B], which request a sample belongs to.
        asked: [B], samples of that request in all.
        sampled: [B], tokens that each sample has.
    """
    if len(requests) <= rows:
        return np.arange(len(requests))
    _, mine, running = np.unique(requests, return_inverse=True, return_counts=True)
    quota = quotas(running, _ALIKE * int(asked.min()), rows)
    if (running <= quota).all():
        return np.arange(len(requests))
    order = np.lexsort((sampled, mine))
    place = np.arange(len(order)) - (np.cumsum(running) - running)[mine[order]]  # among the samples of its request
    return np.sort(order[place < quota[mine[order]]])


def quotas(running: Ints, least: int, rows: int) -> Ints:
    """[R] samples of each request in a step, for [R] of which run: the largest share with which all fit into `rows`,
    what small requests leave being divided among the larger ones; more than that where it is needed for `least`, or
    for every sample to have its turn within `_SLOWEST` steps."""
    size = np.sort(running)
    level = (rows - (np.cumsum(size) - size)) // np.arange(len(size), 0, -1)  # if all smaller ones run whole
    wanted = level[size > level]
    share = max(int(wanted[0]) if len(wanted) else int(size[-1]), least, 1)
    return np.maximum(share, -(-running // _SLOWEST))

"""Fair scheduling of decode steps, so that a request of many samples does not slow down one of few.

The time of a step grows with its rows. Without turns, a request of 64 samples slows down every token of the other
requests. With turns, the large request takes more steps, at most four times as many.

Letters: B running samples, R requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEP_ROWS = 32  # rows shared by requests of different sizes; up to about here a row adds little to the time of a step
DEVICE_STEP_ROWS = 256  # the same on a GPU
_ALIKE = 2  # requests whose sizes differ by no more than this factor run whole
_SLOWEST = 4  # maximum number of steps in which each sample of a request gets a token

Ints = NDArray[np.int64]


def in_turn(requests: Ints, asked: Ints, sampled: Ints, *, rows: int = STEP_ROWS) -> Ints:
    """Indices in [0, B) of the samples whose turn it is, ascending. Each request gets its `quotas`, for the samples
    with the fewest tokens.

    Args:
        requests: [B], number of the request that each sample belongs to.
        asked: [B], number of samples of that request.
        sampled: [B], number of tokens of each sample.
    """
    if len(requests) <= rows:
        return np.arange(len(requests))
    _, mine, running = np.unique(requests, return_inverse=True, return_counts=True)
    quota = quotas(running, _ALIKE * int(asked.min()), rows)
    if (running <= quota).all():
        return np.arange(len(requests))
    order = np.lexsort((sampled, mine))
    place = np.arange(len(order)) - (np.cumsum(running) - running)[mine[order]]  # within its request
    return np.sort(order[place < quota[mine[order]]])


def quotas(running: Ints, least: int, rows: int) -> Ints:
    """[R] maximum number of samples of each request in a step. running: [R], number of running samples of each request.

    The maximum is the largest equal share with which all requests fit into `rows`; rows that small requests do not use
    are divided among the larger ones. It is raised to `least` where the share is smaller, and where a sample would
    otherwise wait for more than `_SLOWEST` steps.
    """
    size = np.sort(running)
    level = (rows - (np.cumsum(size) - size)) // np.arange(len(size), 0, -1)  # if all smaller ones run whole
    wanted = level[size > level]
    share = max(int(wanted[0]) if len(wanted) else int(size[-1]), least, 1)
    return np.maximum(share, -(-running // _SLOWEST))

"""Agreement of two routings of the same tokens.

There are two measures. `topk_agreement` compares whole sets: one near-tie among K experts makes a row differ, so the
measure falls as K grows. The share of common experts does not: a row with one near-tie still has K - 1 of K in common.
`RouteCounts` holds both, and the second also between neighbouring rows, as the level that routes of other tokens reach.

Letters: rows, E experts, K experts per token.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_EXPERTS = 1 << 15  # the most that ids.id_dtype supports


@lru_cache(maxsize=8)
def _marks(device: torch.device) -> Tensor:
    """[_EXPERTS] int64: one random number per id, the same in every process."""
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (_EXPERTS,), generator=torch.Generator().manual_seed(0))
    return drawn.to(device)


def topk_agreement(a: Tensor, b: Tensor) -> Tensor:
    """[rows] bool: whether row i of `a` and of `b` [rows, K] holds the same multiset of experts, in any order.

    Ids are 0..32767; the two integer dtypes may differ. Rows are compared by the sums (mod 2^64) of one random number
    per id (Zobrist, A new hashing method with application for game playing, 1970): equal rows always agree, unequal
    ones with a probability of at most K / 2^64. This takes an eighth of the time of sorting both sides. Raises
    ValueError when the shapes differ.
    """
    if a.shape != b.shape or a.ndim != 2:
        raise ValueError(f"routes {tuple(a.shape)} and {tuple(b.shape)} cannot be compared row by row")
    marks = _marks(a.device)
    mine, theirs = (marks.index_select(0, ids.reshape(-1).to(torch.int64)) for ids in (a, b))
    return (mine - theirs).view(a.shape).sum(-1) == 0


class RouteCounts(NamedTuple):
    """Counts of one layer: the elements of the result of `count_routes`. They add up over passes and ranks."""

    rows: float  # compared
    same_sets: float  # rows with the same set of experts on both sides
    shared: float  # experts common to both sides of a row, summed over rows; at most K per row
    pairs: float  # of a row and the one before or after it, both compared
    shared_with_neighbour: float  # experts common to the choice of one row of a pair and the record of the other


def count_routes(chosen: Tensor, recorded: Tensor, real: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """([5] int64, the fields of `RouteCounts`; [rows] int32, the experts common to both sides of each row), on the
    device of the arguments and without a synchronization.

    chosen, recorded: [rows, K] ids in 0..E-1, of any integer dtype; real: [rows] bool, false for padding, which is not
    counted. Raises ValueError when the shapes differ.
    """
    same = topk_agreement(chosen, recorded) & real
    ids = recorded.to(torch.int64)
    hot = torch.zeros(len(chosen), num_experts, dtype=torch.uint8, device=chosen.device)
    hot.scatter_(1, chosen.to(torch.int64), 1)
    shared = hot.gather(1, ids).sum(1, dtype=torch.int32) * real
    # both neighbours: where rows are shifted, one of them holds the row's own routes and raises the bound
    pairs = real[1:] & real[:-1]
    before = (hot[1:].gather(1, ids[:-1]).sum(1) * pairs).sum()
    after = (hot[:-1].gather(1, ids[1:]).sum(1) * pairs).sum()
    return torch.stack([real.sum(), same.sum(), shared.sum(), 2 * pairs.sum(), before + after]), shared

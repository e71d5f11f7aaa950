"""Matrix products whose rows are the same bits whoever shares the call.

All are computed in fp32, whatever their inputs are in, and rounded once. A kernel for one row, or for a few, may sum in
another order than one for many, so rows are filled up with zeros to a multiple of `FULL`; so are outputs, of which
threads share a number that is no such multiple unequally (seen on Zen 4, from three threads on). Of many columns MKL
sums runs whose length depends on the numbers of rows, outputs and threads (seen from 1024 columns on), so sums are cut
into runs of `COLUMNS` here and added in their order. Beyond that, the library sums every row alike. That is an
assumption about the machine, which `selftest` measures; with it, everything else here is exact by construction. Forward
only is specified: backward may use any arithmetic.

Letters: T rows, K columns that are summed over, N outputs, E experts, P parts of K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

FULL = 16  # rows, and outputs
COLUMNS = 256


def filled_up(x: Tensor, multiple: int, dim: int = 0) -> Tensor:
    """`x` with zeros after its last row along `dim`, so that there is a multiple of them."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def linear(x: Tensor, w: Tensor, parts: int = 1) -> Tensor:
    """x [T, K], w [N, K] of any float dtypes -> x w^T [T, N] in x's.

    parts: K is summed in as many equal parts, added from the first to the last: what that many tensor-parallel ranks
    compute, each of one part (`partial`, `in_rank_order`). Raises ValueError where K does not divide.
    """
    if x.shape[1] % parts:
        raise ValueError(f"{x.shape[1]} columns do not divide into {parts} parts: choose a divisor")
    size = x.shape[1] // parts
    each = zip(torch.split(x, size, -1), torch.split(w, size, -1), strict=True)
    return in_rank_order([partial(a, b) for a, b in each]).to(x.dtype)


def partial(x: Tensor, w: Tensor) -> Tensor:
    """One part of a product, [T, N] fp32: the share of one tensor-parallel rank."""
    full = (filled_up(a.float(), FULL) for a in (x, w))
    runs = zip(*(torch.split(a, COLUMNS, -1) for a in full), strict=True)
    return in_rank_order([F.linear(a, b) for a, b in runs])[: len(x), : len(w)].contiguous()


def in_rank_order(shares: Sequence[Tensor]) -> Tensor:
    """Their sum, from the first on."""
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    return total


def grouped_linear(x: Tensor, w: Tensor | Sequence[Tensor], counts: Sequence[int], parts: int = 1) -> Tensor:
    """x [T, K] sorted by expert, w [E, N, K] or a weight [N, K] for each, counts [E] rows of each -> [T, N], each as
    of `linear`."""
    each = zip(torch.split(x.float(), list(counts)), w, strict=True)
    out = [linear(rows, weight, parts) for rows, weight in each if len(rows)]
    return (torch.cat(out) if out else x.new_zeros(0, w[0].shape[0])).to(x.dtype)

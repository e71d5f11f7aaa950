"""Matrix products whose rows are the same bits whoever shares the call.

A kernel for one row, or for a few, may sum in another order than one for many, so rows are filled up with zeros to a
multiple of `ROWS`. Of fp32 products with many columns MKL sums runs of columns whose length depends on the numbers of
rows, outputs and threads (seen from 1024 columns on), so such sums are cut into runs of `COLUMNS` here and added in
their order. Beyond that, libraries sum every row alike. That is an assumption about the machine, which `selftest`
measures; with it, everything else here is exact by construction. Forward only is specified: backward may use any
arithmetic.

Letters: T rows, K columns that are summed over, N outputs, E experts, P parts of K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16
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
    """x [T, K], w [N, K] of one dtype -> x w^T [T, N] in it.

    parts: K is summed in as many equal parts, each in fp32, added from the first to the last and rounded once: what
    that many tensor-parallel ranks compute, each of one part (`partial`, `in_rank_order`). Raises ValueError where K
    does not divide.
    """
    if parts == 1:
        return _product(x, w)
    if x.shape[1] % parts:
        raise ValueError(f"{x.shape[1]} columns do not divide into {parts} parts: choose a divisor")
    size = x.shape[1] // parts
    each = zip(torch.split(x, size, -1), torch.split(w, size, -1), strict=True)
    return in_rank_order([partial(a, b) for a, b in each]).to(x.dtype)


def partial(x: Tensor, w: Tensor) -> Tensor:
    """One part of a product, [T, N] fp32: the share of one tensor-parallel rank."""
    return _product(x.float(), w.float())


def in_rank_order(shares: Sequence[Tensor]) -> Tensor:
    """Their sum, from the first on."""
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    return total


def grouped_linear(x: Tensor, w: Tensor | Sequence[Tensor], counts: Sequence[int], parts: int = 1) -> Tensor:
    """x [T, K] sorted by expert, w [E, N, K] or a weight [N, K] for each, counts [E] rows of each -> [T, N], each as
    of `linear`."""
    out = [
        linear(rows, weight, parts) for rows, weight in zip(torch.split(x, list(counts)), w, strict=True) if len(rows)
    ]
    return torch.cat(out) if out else x.new_zeros(0, w[0].shape[0])


def _product(x: Tensor, w: Tensor) -> Tensor:
    rows = filled_up(x, ROWS)
    if x.dtype is not torch.float32 or x.shape[1] <= COLUMNS:
        return F.linear(rows, w)[: len(x)]
    runs = zip(torch.split(rows, COLUMNS, -1), torch.split(w, COLUMNS, -1), strict=True)
    return in_rank_order([F.linear(a, b) for a, b in runs])[: len(x)]

"""Batch-invariant matrix products: the bits of a row's result do not depend on the other rows.

All products are computed in fp32, whatever the dtype of the inputs, and rounded once. A kernel for one row, or for a
few, may sum in another order than one for many, so rows are padded with zeros to a multiple of `FULL`. So are outputs:
threads divide other numbers of outputs unequally (observed on Zen 4, from three threads on). MKL sums many columns in
runs whose length depends on the numbers of rows, outputs and threads (observed from 1024 columns on), so sums are cut
into runs of `COLUMNS` and added in order. Beyond that, the library is assumed to sum every row alike. `selftest`
verifies this assumption on each machine; given it, everything else here is exact by construction. Only the forward pass
is specified: backward may use any arithmetic.

Letters: T rows, K columns that are summed over, N outputs, E experts, P shards of K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

FULL = 16  # rows, and outputs
COLUMNS = 256


def padded(x: Tensor, multiple: int, dim: int = 0) -> Tensor:
    """`x`, padded with zeros at the end of `dim` to a multiple of `multiple`."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def linear(x: Tensor, w: Tensor, shards: int = 1) -> Tensor:
    """x [T, K], w [N, K] of any float dtypes -> x w^T [T, N] in x's.

    shards: K is summed in this number of equal shards, added from first to last, as by as many tensor-parallel ranks
    that compute one shard each (`partial`, `in_rank_order`). Raises ValueError where K does not divide.
    """
    if x.shape[1] % shards:
        raise ValueError(f"{x.shape[1]} columns are not divisible into {shards} shards: choose a divisor")
    if shards == 1:
        return partial(x, w).to(x.dtype)
    size = x.shape[1] // shards
    each = zip(torch.split(x, size, -1), torch.split(w, size, -1), strict=True)
    return in_rank_order([partial(a, b) for a, b in each]).to(x.dtype)


def partial(x: Tensor, w: Tensor) -> Tensor:
    """One shard of a product, [T, N] fp32: the partial sum of one tensor-parallel rank."""
    rows, outputs = padded(x.float(), FULL), padded(w.float(), FULL)
    if x.shape[1] <= COLUMNS:  # one run, as a split would give
        return F.linear(rows, outputs)[: len(x), : len(w)].contiguous()
    runs = zip(torch.split(rows, COLUMNS, -1), torch.split(outputs, COLUMNS, -1), strict=True)
    return in_rank_order([F.linear(a, b) for a, b in runs])[: len(x), : len(w)].contiguous()


def in_rank_order(partials: Sequence[Tensor]) -> Tensor:
    """The sum of `partials`, added from first to last."""
    total = partials[0]
    for p in partials[1:]:
        total = total + p
    return total


def grouped_linear(x: Tensor, w: Tensor | Sequence[Tensor], counts: Sequence[int], shards: int = 1) -> Tensor:
    """x [T, K] sorted by expert, w [E, N, K] or a sequence of E weights [N, K], counts [E] rows of each -> [T, N]: the
    `linear` of each expert."""
    each = zip(torch.split(x.float(), list(counts)), w, strict=True)
    out = [linear(rows, weight, shards) for rows, weight in each if len(rows)]
    return (torch.cat(out) if out else x.new_zeros(0, w[0].shape[0])).to(x.dtype)

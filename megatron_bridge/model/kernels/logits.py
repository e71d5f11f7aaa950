"""Triton kernels over a block of logits: softmax sums in one pass, and the slope of the logits in one pass, in place.

Both read the product's output in the model's dtype and compute in fp32. `megatron_bridge/model/logprobs.py` has the
products around them and the plain path. For a logit of w bytes the sums read w and the slope reads and writes w, which
is what has to be moved; the plain path moves about 40 bytes for the sums and 34 for the slope. docs/gpu.md has the
times.

Letters: n rows, L labels per row, c columns of the block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WIDEST = 4096  # columns that a program reads at a time


@triton.jit
def sums_kernel(
    logits,
    labels,
    top,
    sums,
    rows,
    columns,
    first,
    stride,
    temperature,
    label_count,
    BLOCK: tl.constexpr,
):
    """A program: one row of logits [n, c] added to top [n] and sums [2 + L, n]."""
    row = tl.program_id(0)
    own = logits + row.to(tl.int64) * stride
    highest = tl.load(top + row)
    z = tl.load(sums + row)
    weighted = tl.load(sums + rows + row)
    offsets = tl.arange(0, BLOCK)
    for a in range(0, columns, BLOCK):
        inside = a + offsets < columns
        x = tl.load(own + a + offsets, mask=inside, other=float("-inf")).to(tl.float32) / temperature
        higher = tl.maximum(highest, tl.max(x, 0))
        gap = tl.maximum(highest - higher, -1e30)  # no row yet: -inf, which times 0 is not a number
        factor = tl.exp(gap)
        below = tl.where(inside, x - higher, 0.0)
        exps = tl.where(inside, tl.exp(below), 0.0)
        weighted = (weighted + gap * z) * factor + tl.sum(exps * below, 0)
        z = z * factor + tl.sum(exps, 0)
        highest = higher
    tl.store(top + row, highest)
    tl.store(sums + row, z)
    tl.store(sums + rows + row, weighted)
    for j in range(label_count):
        label = tl.load(labels + row.to(tl.int64) * label_count + j) - first
        if (label >= 0) & (label < columns):
            into = sums + (2 + j) * rows + row
            tl.store(into, tl.load(into) + tl.load(own + label).to(tl.float32) / temperature)


@triton.jit
def slope_kernel(
    logits,
    labels,
    lse,
    entropy,
    grad,
    of_entropy,
    columns,
    first,
    stride,
    temperature,
    label_count,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program: BLOCK columns of one row of logits [n, c], replaced by their slope."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = logits + row * stride + column
    log_p = tl.load(at, mask=inside, other=0.0).to(tl.float32) / temperature - tl.load(lse + row)
    p = tl.exp(log_p)
    of_p = tl.load(grad + row * label_count)
    for j in range(1, label_count):
        of_p += tl.load(grad + row * label_count + j)
    if ENTROPY:
        of_p += tl.load(of_entropy + row) * (log_p + tl.load(entropy + row))
    slope = -p * of_p
    for j in range(label_count):
        label = tl.load(labels + row * label_count + j) - first
        slope += tl.where(column == label, tl.load(grad + row * label_count + j), 0.0)
    tl.store(at, slope.to(logits.dtype.element_ty), mask=inside)


def add_block(logits: Tensor, labels: Tensor, first: int, temperature: float, top: Tensor, sums: Tensor) -> None:
    """Adds columns `first` .. `first + c` of the vocabulary to the sums of `logprobs.py`, in place.

    logits [n, c], not divided by the temperature, rows contiguous; labels int64 [n, L] from the vocabulary's first
    column; top fp32 [n], the largest logit so far (-inf for none); sums fp32 [2 + L, n].
    """
    (rows, columns), count = logits.shape, labels.shape[1]
    block = min(_WIDEST, max(16, triton.next_power_of_2(columns)))
    sums_kernel[(rows,)](
        logits,
        labels.contiguous(),
        top,
        sums,
        rows,
        columns,
        first,
        logits.stride(0),
        temperature,
        count,
        BLOCK=block,
        num_warps=8 if block == _WIDEST else 4,
    )


def slope_in_place(
    logits: Tensor,
    labels: Tensor,
    first: int,
    temperature: float,
    lse: Tensor,
    entropy: Tensor,
    grad: Tensor,
    of_entropy: Tensor | None,
) -> Tensor:
    """The gradient of a block's logits, written over them and returned: `_slope` of `logprobs.py`, rounded once.

    logits, labels, first, temperature: as `add_block`; lse and entropy fp32 [n]; grad fp32 [n, L]; of_entropy fp32 [n].
    """
    (rows, columns), count = logits.shape, labels.shape[1]
    if count == 0:
        labels, grad, count = labels.new_full((rows, 1), -1), grad.new_zeros(rows, 1), 1
    block = min(_WIDEST // 2, max(16, triton.next_power_of_2(columns)))
    slope_kernel[(rows, triton.cdiv(columns, block))](
        logits,
        labels.contiguous(),
        lse,
        entropy,
        grad.contiguous(),
        lse if of_entropy is None else of_entropy.contiguous(),
        columns,
        first,
        logits.stride(0),
        temperature,
        count,
        ENTROPY=of_entropy is not None,
        BLOCK=block,
        num_warps=4,
    )
    return logits

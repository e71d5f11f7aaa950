"""A Triton kernel that adds up rows chosen by an index: tokens from their experts' outputs, without atomics.

Letters: n routed rows, T tokens, H hidden size. The kernel reads each row once and writes T, (n + T) H elements, which
is what has to be moved; the sum is in fp32, in the order of the index, and rounded once.
torch's scatter_add reads as much and adds each element to the output by an atomic operation in the rows' dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDEST = 2048  # elements that a program writes


@triton.jit
def sum_kernel(rows, places, ends, out, width, BLOCK: tl.constexpr):
    """A program: BLOCK elements of one row of out [T, H]: the sum of rows [n, H] at places[ends[t] : ends[t + 1]]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.load(ends + token), tl.load(ends + token + 1)):
        row = tl.load(places + i).to(tl.int64)
        total += tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def summed_rows(rows: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """[T, H]: row t is the sum of rows [n, H] at places[ends[t] : ends[t + 1]]; int64 [n], int32 [T + 1]."""
    rows, width = rows.contiguous(), rows.shape[1]
    tokens = len(ends) - 1
    out = rows.new_empty(tokens, width)
    block = min(_WIDEST, max(16, triton.next_power_of_2(width)))
    sum_kernel[(tokens, triton.cdiv(width, block))](rows, places, ends, out, width, BLOCK=block, num_warps=4)
    return out


class Spread(torch.autograd.Function):
    """tokens [T, H] -> rows [n, H] = tokens at `sources` [n]; `places`, `ends`: each token's rows, as `summed_rows`."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sources: Tensor, places: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(places, ends)
        return tokens.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return summed_rows(grad, *ctx.saved_tensors), None, None, None


class Gathered(torch.autograd.Function):
    """The reverse of `Spread`: rows [n, H] -> tokens [T, H], each the sum of its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sources: Tensor, places: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(sources)
        return summed_rows(rows, places, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (sources,) = ctx.saved_tensors
        return grad.index_select(0, sources), None, None, None

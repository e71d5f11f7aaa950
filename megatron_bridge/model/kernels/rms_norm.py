"""Triton kernels of RMSNorm and its gradient.

Letters: M rows of N elements, P programs. Forward reads x and writes y (2 M N elements), backward reads x and the
output's gradient and writes that of x (3 M N), which is what has to be moved but for P N numbers of fp32 of the
weight's gradient. fp32 inside, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024  # elements that a program reads at a time, where a row is shorter
_PROGRAMS = 4096  # of backward, each with its own sum of the weight's gradient


@triton.jit
def forward_kernel(x, weight, out, scales, rows, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A program: ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    value = wide * scale[:, None] * w[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit
def backward_kernel(
    x, weight, scales, grad, of_x, of_weight, rows, width, each, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """A program: `each` times ROWS consecutive rows, and their sum of the weight's gradient."""
    program = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in range(each):
        row = (program * each + i) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        normed = wide * scale
        total += g * normed
        g = g * w[None, :]
        along = tl.sum(g * normed, 1) / width
        value = (g - normed * along[:, None]) * scale
        tl.store(of_x + at, value.to(of_x.dtype.element_ty), mask=inside)
    tl.store(of_weight + program.to(tl.int64) * width + column, tl.sum(total, 0), mask=column < width)


def _tile(width: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program."""
    columns = max(16, triton.next_power_of_2(width))
    rows = max(1, min(32, _TILE // columns))
    return rows, columns, min(32, max(4, rows * columns // 512))  # 16 elements a thread


class FusedRMSNorm(torch.autograd.Function):
    """x [..., N] over the root of the mean of its squares plus eps, times weight [N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        x = x.contiguous()
        count = x.numel() // width
        out, scales = torch.empty_like(x), x.new_empty(count, dtype=torch.float32)
        rows, columns, warps = _tile(width)
        forward_kernel[(triton.cdiv(count, rows),)](
            x, weight, out, scales, count, width, eps, ROWS=rows, WIDTH=columns, num_warps=warps
        )
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        width, count = x.shape[-1], len(scales)
        rows, columns, warps = _tile(width)
        tiles = triton.cdiv(count, rows)
        each = max(1, triton.cdiv(tiles, _PROGRAMS))
        programs = triton.cdiv(tiles, each)
        of_x = torch.empty_like(x)
        of_weight = x.new_empty(programs, width, dtype=torch.float32)
        backward_kernel[(programs,)](
            x,
            weight,
            scales,
            grad.contiguous(),
            of_x,
            of_weight,
            count,
            width,
            each,
            ROWS=rows,
            WIDTH=columns,
            num_warps=warps,
        )
        return of_x, of_weight.sum(0).to(weight.dtype), None

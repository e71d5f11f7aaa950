"""Triton kernels of SwiGLU times a weight per row, as the experts compute it.

Letters: T rows, F an expert's inner size. Forward moves 3 F elements a row (reads 2 F, writes F), backward 5 F (reads
3 F, writes 2 F), which is what has to be moved; fp32 inside, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024  # elements that a program reads at a time


@triton.jit
def forward_kernel(h, weights, out, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A program: ROWS rows of h [T, 2F] -> out [T, F]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    weight = tl.load(weights + row, mask=real, other=0.0).to(tl.float32)[:, None]
    row = row.to(tl.int64)[:, None]
    for a in range(0, width, BLOCK):
        column = a + tl.arange(0, BLOCK)[None, :]
        inside = real[:, None] & (column < width)
        at = h + row * 2 * width + column
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up * weight
        tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(h, weights, grad, of_h, of_weights, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A program: the gradients of ROWS rows of h and of their weights."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    weight = tl.load(weights + row, mask=real, other=0.0).to(tl.float32)[:, None]
    into_weights = of_weights + row
    row = row.to(tl.int64)[:, None]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for a in range(0, width, BLOCK):
        column = a + tl.arange(0, BLOCK)[None, :]
        inside = real[:, None] & (column < width)
        at = row * 2 * width + column
        gate = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(h + at + width, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        silu = gate * share
        total += silu * up * g
        g = g * weight
        of_gate = g * up * share * (1 + gate * (1 - share))
        tl.store(of_h + at, of_gate.to(of_h.dtype.element_ty), mask=inside)
        tl.store(of_h + at + width, (g * silu).to(of_h.dtype.element_ty), mask=inside)
    tl.store(into_weights, tl.sum(total, 1).to(of_weights.dtype.element_ty), mask=real)


def tile(width: int) -> tuple[int, int]:
    """(rows, columns) that a program reads at a time: columns that divide the width, where enough do, idle no lane."""
    columns = min(_TILE, width & -width)
    if columns < 64:
        columns = min(_TILE, max(16, triton.next_power_of_2(width)))
    return _TILE // columns, columns


class WeightedSwiGLU(torch.autograd.Function):
    """silu(h[:, :F]) h[:, F:] weights: h [T, 2F], weights [T, 1] -> [T, F] in h's dtype."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weights: Tensor) -> Tensor:
        h, weights = h.contiguous(), weights.contiguous()
        ctx.save_for_backward(h, weights)
        width = h.shape[1] // 2
        out = h.new_empty(len(h), width)
        rows, block = tile(width)
        programs = triton.cdiv(len(h), rows)
        forward_kernel[(programs,)](h, weights, out, len(h), width, ROWS=rows, BLOCK=block, num_warps=4)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        h, weights = ctx.saved_tensors
        width = h.shape[1] // 2
        of_h, of_weights = torch.empty_like(h), torch.empty_like(weights)
        rows, block = tile(width)
        backward_kernel[(triton.cdiv(len(h), rows),)](
            h, weights, grad.contiguous(), of_h, of_weights, len(h), width, ROWS=rows, BLOCK=block, num_warps=4
        )
        return of_h, of_weights

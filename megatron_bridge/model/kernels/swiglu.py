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

_WIDEST = 1024  # elements that a program reads at a time


@triton.jit
def forward_kernel(h, weights, out, width, BLOCK: tl.constexpr):
    """A program: one row of h [T, 2F] -> out [T, F]."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    gates, ups = h + row * 2 * width, h + row * 2 * width + width
    for a in range(0, width, BLOCK):
        column = a + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(gates + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(ups + column, mask=inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up * weight
        tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(h, weights, grad, of_h, of_weights, width, BLOCK: tl.constexpr):
    """A program: one row's gradients of h and of its weight."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    first, second = row * 2 * width, row * 2 * width + width
    total = tl.zeros((BLOCK,), tl.float32)
    for a in range(0, width, BLOCK):
        column = a + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(h + first + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(h + second + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        silu = gate * share
        total += silu * up * g
        g = g * weight
        of_gate = g * up * share * (1 + gate * (1 - share))
        tl.store(of_h + first + column, of_gate.to(of_h.dtype.element_ty), mask=inside)
        tl.store(of_h + second + column, (g * silu).to(of_h.dtype.element_ty), mask=inside)
    tl.store(of_weights + row, tl.sum(total, 0).to(of_weights.dtype.element_ty))


def _block(width: int) -> int:
    return min(_WIDEST, max(16, triton.next_power_of_2(width)))


class WeightedSwiGLU(torch.autograd.Function):
    """silu(h[:, :F]) h[:, F:] weights: h [T, 2F], weights [T, 1] -> [T, F] in h's dtype."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weights: Tensor) -> Tensor:
        h, weights = h.contiguous(), weights.contiguous()
        ctx.save_for_backward(h, weights)
        width = h.shape[1] // 2
        out = h.new_empty(len(h), width)
        forward_kernel[(len(h),)](h, weights, out, width, BLOCK=_block(width), num_warps=4)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        h, weights = ctx.saved_tensors
        width = h.shape[1] // 2
        of_h, of_weights = torch.empty_like(h), torch.empty_like(weights)
        backward_kernel[(len(h),)](
            h, weights, grad.contiguous(), of_h, of_weights, width, BLOCK=_block(width), num_warps=4
        )
        return of_h, of_weights

"""A Triton kernel of the rotary embedding and, with the angles turned back, of its gradient.

Letters: T tokens, h heads, d dimensions of a head, s <= d rotated ones. A pass reads and writes T h d elements, which
is what has to be moved; cosines and sines, T s each, are shared by the heads. fp32 inside, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rotate_kernel(
    x,
    cos,
    sin,
    out,
    heads,
    half,
    token_stride,
    head_stride,
    size,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """A program: one token's heads, both halves of their first dimensions."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < half)
    at = x + token * token_stride + head * head_stride + column
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    angle = token * 2 * half + column
    cos1 = tl.load(cos + angle, mask=column < half, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + angle + half, mask=column < half, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + angle, mask=column < half, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + angle + half, mask=column < half, other=0.0).to(tl.float32)
    if BACK:
        rotated = first * cos1 + second * sin2
        rotated2 = second * cos2 - first * sin1
    else:
        rotated = first * cos1 - second * sin1
        rotated2 = second * cos2 + first * sin2
    into = out + (token * heads + head) * size + column
    tl.store(into, rotated.to(out.dtype.element_ty), mask=inside)
    tl.store(into + half, rotated2.to(out.dtype.element_ty), mask=inside)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    (tokens, heads, size), half = x.shape, cos.shape[-1] // 2
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(x.shape)
    if size > 2 * half:
        out[..., 2 * half :] = x[..., 2 * half :]
    blocks = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    rotate_kernel[(tokens,)](
        x,
        cos,
        sin,
        out,
        heads,
        half,
        x.stride(0),
        x.stride(1),
        size,
        BACK=back,
        HEADS=blocks[0],
        HALF=blocks[1],
        num_warps=4 if blocks[0] * blocks[1] <= 4096 else 8,
    )
    return out


class FusedRope(torch.autograd.Function):
    """x [T, h, d], whose first s dimensions are rotated: halves into each other, by cos and sin [T, s]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _rotated(grad, *ctx.saved_tensors, back=True), None, None

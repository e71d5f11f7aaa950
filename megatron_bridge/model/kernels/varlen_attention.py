"""FlashAttention-2 of torch over the segments of a pack, in one call, with keys and values of fewer heads than queries.

Letters: T packed tokens, N segments, h and g heads of queries and of keys and values, d query/key and v value size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGEST = 256  # d that the kernel supports


def supports(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel takes these tensors."""
    d, v = query.shape[-1], value.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and query.dtype == value.dtype and d % 8 == 0 and v <= d <= _LARGEST


class _Varlen(torch.autograd.Function):
    """The arguments of aten's flash attention are those of torch 2.11 to 2.13; `torch.nn.attention.varlen` wraps the
    same operators."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, ends, ends, longest, longest, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, state, unused, ends)
        ctx.longest, ctx.scale = longest, scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, state, unused, ends = ctx.saved_tensors
        longest = ctx.longest
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            q,
            k,
            v,
            out,
            lse,
            ends,
            ends,
            longest,
            longest,
            0.0,
            True,
            state,
            unused,
            scale=ctx.scale,
        )
        return *grads, None, None, None


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
    """softmax(q k^T * scale) v, causal within each segment: [T, h, v].

    query [T, h, d], key [T, g, d], value [T, g, v], BF16 or FP16 on a CUDA device; g divides h and v <= d, values are
    padded to d. ends [N + 1] int32 on the device: cu_seqlens; longest: of the segments.
    """
    d, v = query.shape[-1], value.shape[-1]
    if v < d:
        value = F.pad(value, (0, d - v))
    out: Tensor = _Varlen.apply(query, key, value, ends, longest, scale)  # type: ignore[no-untyped-call]
    return out[..., :v] if v < d else out

"""Rotary embedding of packed segments in one indexed lookup; megatron slices once per segment.

Letters: T packed tokens of this rank, h heads, d rotary dimensions, N segments, S longest segment.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

from megatron_bridge.model.kernels.chosen import by_triton

assert hasattr(rope_utils, "_apply_rotary_pos_emb_thd"), "megatron's packed rotary embedding is gone"


def on_device(ends: Tensor, device: torch.device) -> Tensor:
    """cu_seqlens `ends` [N+1] of the CPU as int32 on `device`, whose values `ends_of` finds without waiting for it."""
    out = ends.to(torch.int32).to(device)
    out.values_on_host = tuple(ends.tolist())  # type: ignore[attr-defined]
    return out


def ends_of(cu_seqlens: Tensor) -> tuple[int, ...]:
    """The values of cu_seqlens [N+1]."""
    found: tuple[int, ...] | None = getattr(cu_seqlens, "values_on_host", None)
    return tuple(cu_seqlens.tolist()) if found is None else found


@functools.lru_cache(maxsize=64)
def packed_positions(cu_seqlens: tuple[int, ...], rank: int, size: int, device: torch.device) -> Tensor:
    """[T] int64: position in its segment of each token of this context-parallel rank.

    cu_seqlens [N+1] of the whole pack. A rank of `size` > 1 holds chunks `rank` and `2 size - 1 - rank` of each.
    """
    lengths = torch.tensor(cu_seqlens).diff() // size
    own = torch.repeat_interleave(lengths, lengths)  # tokens of the same segment on this rank
    at = torch.arange(len(own)) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    if size > 1:
        chunk = own // 2
        at = torch.where(at < chunk, rank * chunk + at, size * own - (rank + 1) * chunk + at - chunk)
    return at.to(device)


def apply_packed_rope(
    t: Tensor,  # [T, h, d]
    cu_seqlens: Tensor,  # [N+1] int32, of the whole pack
    freqs: Tensor,  # [S, 1, 1, d]: by position in a segment
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
) -> Tensor:
    """[T, h, d]: bitwise equal to megatron's `_apply_rotary_pos_emb_thd`, without its loop over segments; sines and
    cosines are computed once per position, not once per token. By the Triton kernel the products and their sum are
    rounded once, not each."""
    positions = packed_positions(ends_of(cu_seqlens), cp_group.rank(), cp_group.size(), t.device)
    size = freqs.shape[-1]
    fused = not rotary_interleaved and not multi_latent_attention and by_triton("rope", t)
    # repeated for every head: on a CPU a product that broadcasts over heads takes several times as long
    heads = 1 if rotary_interleaved or fused else t.shape[1]
    cos, sin = (
        (f(freqs[:, 0]) * mscale).to(t.dtype).repeat(1, heads, 1).index_select(0, positions)
        for f in (torch.cos, torch.sin)
    )
    if fused:
        from megatron_bridge.model.kernels.rope import FusedRope

        return FusedRope.apply(t, cos[:, 0], sin[:, 0])  # type: ignore[no-any-return, no-untyped-call]
    if rotary_interleaved:
        t, rest = t[..., :size], t[..., size:]
        rotated = t * cos + rope_utils._rotate_half(t[None], True)[0] * sin
        return torch.cat((rotated, rest), -1)
    out: Tensor = _Rotated.apply(t, cos, sin, multi_latent_attention)  # type: ignore[no-untyped-call]
    return out


class _Rotated(torch.autograd.Function):
    """[T, h, d] with its first dimensions rotated, as many as cos and sin [T, h, .] have. Autograd would allocate a
    full tensor of zeros for each half that is read, and sum them; the gradient is bitwise the same."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor, in_pairs: bool) -> Tensor:
        """in_pairs: halves are the even and the odd dimensions of t, as in MLA's checkpoints."""
        ctx.save_for_backward(cos, sin)
        ctx.in_pairs = in_pairs
        out, size = torch.empty_like(t), cos.shape[-1]
        first, second = _halves(t, size, in_pairs)
        into, into2 = _halves(out, size, False)
        (cos, cos2), (sin, sin2) = cos.chunk(2, -1), sin.chunk(2, -1)
        torch.sub(first * cos, second * sin, out=into)
        torch.add(second * cos2, first * sin2, out=into2)
        out[..., size:] = t[..., size:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        size = cos.shape[-1]
        of_t = torch.empty_like(grad)
        g, g2 = _halves(grad, size, False)
        into, into2 = _halves(of_t, size, ctx.in_pairs)
        (cos, cos2), (sin, sin2) = cos.chunk(2, -1), sin.chunk(2, -1)
        torch.add(g * cos, g2 * sin2, out=into)
        torch.sub(g2 * cos2, g * sin, out=into2)
        of_t[..., size:] = grad[..., size:]
        return of_t, None, None, None


def _halves(x: Tensor, size: int, in_pairs: bool) -> tuple[Tensor, Tensor]:
    """Views of the two halves of the first `size` dimensions, which are rotated into each other."""
    return (x[..., 0:size:2], x[..., 1:size:2]) if in_pairs else (x[..., : size // 2], x[..., size // 2 : size])

"""Rotary embedding of packed segments: positions are looked up at once, where megatron cuts a slice for every segment.

Letters: T packed tokens of this rank, h heads, d rotary dimensions, N segments, S longest segment.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

assert hasattr(rope_utils, "_apply_rotary_pos_emb_thd"), "megatron's packed rotary embedding is gone"


@functools.lru_cache(maxsize=64)
def packed_positions(cu_seqlens: tuple[int, ...], rank: int, size: int, device: torch.device) -> Tensor:
    """[T] int64: position of each of this context-parallel rank's tokens in its segment.

    cu_seqlens [N+1] of the whole pack. A rank of `size` > 1 holds chunks `rank` and `2 size - 1 - rank` of each.
    """
    lengths = torch.tensor(cu_seqlens).diff() // size
    own = torch.repeat_interleave(lengths, lengths)  # tokens of its segment here
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
    """[T, h, d]: bitwise megatron's `_apply_rotary_pos_emb_thd`, without its loop over segments; angles are turned into
    sines and cosines once a position, not once a token."""
    positions = packed_positions(tuple(cu_seqlens.tolist()), cp_group.rank(), cp_group.size(), t.device)
    cos, sin = ((f(freqs[:, 0]) * mscale).to(t.dtype).index_select(0, positions) for f in (torch.cos, torch.sin))
    size = freqs.shape[-1]
    t, rest = t[..., :size], t[..., size:]
    if rotary_interleaved:
        turned = t * cos + rope_utils._rotate_half(t[None], True)[0] * sin
        return torch.cat((turned, rest), -1)
    first, second = (t[..., 0::2], t[..., 1::2]) if multi_latent_attention else t.chunk(2, -1)
    (cos, cos2), (sin, sin2) = cos.chunk(2, -1), sin.chunk(2, -1)
    halves = first * cos - second * sin, second * cos2 + first * sin2
    return torch.cat((*halves, rest) if rest.shape[-1] else halves, -1)

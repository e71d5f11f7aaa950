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
    """[T, h, d]: bitwise megatron's `_apply_rotary_pos_emb_thd`, without its loop over segments."""
    positions = packed_positions(tuple(cu_seqlens.tolist()), cp_group.rank(), cp_group.size(), t.device)
    rotated = rope_utils._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1),
        freqs.index_select(0, positions),
        rotary_interleaved=rotary_interleaved,
        multi_latent_attention=multi_latent_attention,
        mscale=mscale,
    )
    return rotated.squeeze(1)

"""Rotary positions of a pack, looked up at once, beside megatron's loop over segments."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.spawn import run_ranks


def _compare(rank: int, world: int, port: int) -> dict[str, bool]:
    from megatron_bridge.device.device import init_device

    init_device()
    from megatron.core.models.common.embeddings import rope_utils

    from megatron_bridge.model.packed_rope import apply_packed_rope

    stock = rope_utils._apply_rotary_pos_emb_thd
    out = {}
    for size, lengths in {1: [5, 1, 12, 0, 7], 2: [8, 4, 12, 0], 4: [16, 8]}.items():
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        freqs = torch.randn(max(lengths), 1, 1, 8)
        for r in range(size):
            group: Any = SimpleNamespace(rank=lambda r=r: r, size=lambda size=size: size)
            tokens = sum(lengths) // size
            for how in ({}, {"rotary_interleaved": True}, {"multi_latent_attention": True, "mscale": 0.7}):
                for turned, dtype in itertools.product((4, 8), (torch.float32, torch.bfloat16)):
                    t, grad = torch.randn(2, tokens, 3, 8, dtype=dtype)
                    t.requires_grad_()
                    angles = freqs[..., :turned]
                    turns = [f(t, cu, angles, cp_group=group, **how) for f in (stock, apply_packed_rope)]
                    back = [torch.autograd.grad(turn, t, grad)[0] for turn in turns]
                    out[f"{size} {r} {sorted(how)} {turned} {dtype}"] = torch.equal(*turns) and torch.equal(*back)
    return out


def test_it_is_megatron_s_own_rotation_bit_for_bit() -> None:
    """With its gradient. Plain, interleaved and MLA's order of dimensions, all of them turned or half; one rank, and
    each of two and four context-parallel ranks; an empty segment; fp32 and bf16. Not covered: a pack
    as long as its longest segment of several, which megatron rotates from the pack's start instead of each segment's
    (no such pack can be)."""
    [found] = run_ranks(_compare, 1)
    assert len(found) == 12 * (1 + 2 + 4) and all(found.values()), [k for k, same in found.items() if not same]

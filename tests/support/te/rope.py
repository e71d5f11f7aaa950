"""Rotary embedding of TransformerEngine's extension in PyTorch, over packed sequences ("thd") of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _positions(cu_seqlens: Tensor) -> Tensor:
    return torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])


def _rotated(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _turn(t: Tensor, freqs: Tensor, cu_seqlens: Tensor, interleaved: bool, sign: float) -> Tensor:
    angles = freqs[_positions(cu_seqlens)].reshape(len(t), 1, -1)
    size = angles.shape[-1]
    turned, rest = t[..., :size].float(), t[..., size:]
    turned = turned * angles.cos() + sign * _rotated(turned, interleaved) * angles.sin()
    return torch.cat((turned.to(t.dtype), rest), -1)


def fused_rope_forward(
    t: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    form: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """t [T, h, d] rotated by freqs [s, 1, 1, e <= d]: the first e elements of each head, by their position."""
    assert start_positions is None and cu_seqlens is not None and cp_size == 1, "not emulated"
    return _turn(t, freqs, cu_seqlens, interleaved, 1.0)


def fused_rope_backward(
    grad: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    form: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """The same rotation backwards."""
    assert start_positions is None and cu_seqlens is not None and cp_size == 1, "not emulated"
    return _turn(grad, freqs, cu_seqlens, interleaved, -1.0)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fused_rope_forward": fused_rope_forward,
    "fused_rope_backward": fused_rope_backward,
}

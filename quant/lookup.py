"""Codes to values by table: two values a look-up, as bf16, which holds every value of an 8- or 4-bit format exactly.

PyTorch's own cast of e4m3 on CPU takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Values = Callable[[Tensor], Tensor]  # uint8 codes -> fp32, same shape


@lru_cache(maxsize=16)
def _of_bytes(values: Values) -> Tensor:
    """int32 [65536]: the bf16 values of the two bytes of each 16-bit number, low byte first."""
    of = values(torch.arange(256, dtype=torch.uint8)).to(torch.bfloat16)
    low, high = of.repeat(256), of.repeat_interleave(256)
    return torch.stack([low, high], 1).contiguous().view(torch.int32).flatten()


@lru_cache(maxsize=16)
def _of_nibbles(values: Values) -> Tensor:
    """int32 [256]: the bf16 values of the two nibbles of each byte, low nibble first."""
    of = values(torch.arange(16, dtype=torch.uint8)).to(torch.bfloat16)
    low, high = of.repeat(16), of.repeat_interleave(16)
    return torch.stack([low, high], 1).contiguous().view(torch.int32).flatten()


def byte_values(codes: Tensor, values: Values) -> Tensor:
    """bf16 values of one-byte codes, any dtype of one byte, any shape."""
    flat = codes.contiguous().view(torch.uint8).flatten()
    if flat.device.type != "cpu" or flat.numel() % 2:
        return values(flat).to(torch.bfloat16).view(codes.shape)
    index = flat.view(torch.uint16).to(torch.int32)
    return _of_bytes(values).index_select(0, index).view(torch.bfloat16).view(codes.shape)


def nibble_values(packed: Tensor, values: Values) -> Tensor:
    """bf16 values [..., 2c] of uint8 [..., c]: two codes a byte, the low nibble first."""
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    if packed.device.type != "cpu":
        pair = torch.stack([packed & 15, packed >> 4], -1)
        return values(pair).to(torch.bfloat16).view(shape)
    index = packed.contiguous().flatten().to(torch.int32)
    return _of_nibbles(values).index_select(0, index).view(torch.bfloat16).view(shape)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., 2c] below 16 -> uint8 [..., c]: even columns in the low nibble."""
    pairs = codes.contiguous().view(torch.int16)  # little endian: the even one is the low byte
    return pairs.bitwise_right_shift(4).bitwise_or_(pairs).to(torch.uint8)

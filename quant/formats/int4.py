"""Symmetric INT4 by groups of a row, stored as compressed-tensors' `pack-quantized` (Kimi-K2-Thinking, W4A16).

Letters: B weights of one shape, r rows (out) and c columns (in) of a tile, g columns per group.

Encode, of the bf16 weight: s = bf16(max(amax / 7, 1e-5)), q = round(w / s) to nearest even, -7 .. 7. The integers are
chosen with the rounded scale, as stored. Decode: bf16(q * s). Stored: `weight_packed` int32 [n, k / 8], nibble i of
word j is q[8 j + i] + 8, lowest first; `weight_scale` bf16 [n, k / g]; `weight_shape` int64 [2] = n, k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quant.formats.codec import Codec, PerBlock, PerWeight
from quant.formats.lookup import int4_values, pack_nibbles
from quant.formats.scale_rules import INT4_GREATEST, INT4_LEAST, INT4_LEVELS
from quant.formats.tiles import divide_, groups
from quant.spec import QuantFormat, QuantSpec

_OFFSET = 8
_ROUNDS = 1.5 * 2.0**23  # the spacing of fp32 at this number is 1: adding it rounds, ties to even


class Int4Codec(Codec):
    """The codec of `QuantFormat.INT4`."""

    bf16_values = True  # the format's definition

    def __init__(self, spec: QuantSpec) -> None:
        if spec.format is not QuantFormat.INT4:
            raise ValueError(f"the INT4 codec does not support a spec of format {spec.format}")
        super().__init__(spec)
        self.stored = {
            "weight_packed": PerBlock(torch.int32, 1, 8),
            "weight_scale": PerBlock(torch.bfloat16, 1, self.block[1]),
            "weight_shape": PerWeight(torch.int64, (2,)),
        }

    def _choose(self, w: Tensor, bits: Tensor, top: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        scales = divide_(bits.view(torch.bfloat16).float(), INT4_LEVELS)
        scales = scales.clamp_(INT4_LEAST, INT4_GREATEST).to(torch.bfloat16)
        x = w.to(torch.float32, memory_format=torch.contiguous_format)
        # the relative error of the bf16 scale is at most 2^-8, so no quotient reaches 7.5: no clamp is needed
        groups(x, self.block[1]).div_(scales.float()[..., None])
        return x, (scales,)

    def _pack(self, codes: Tensor) -> Tensor:
        return pack_nibbles(codes.add_(_ROUNDS + _OFFSET).view(torch.int32).to(torch.uint8)).view(torch.int32)

    def _levels(self, codes: Tensor) -> Tensor:
        return codes.add_(_ROUNDS).sub_(_ROUNDS)  # integers have no -0

    def _unpack(self, packed: Tensor) -> Tensor:
        return int4_values(packed.contiguous().view(torch.uint8))

    def _scaled(self, levels: Tensor, scales: tuple[Tensor, ...], top: Tensor | None, dtype: torch.dtype) -> Tensor:
        groups(levels, self.block[1]).mul_(scales[0].float()[..., None])
        return levels if dtype is torch.bfloat16 else levels.to(torch.bfloat16)

    def _whole(self, shape: tuple[int, ...], top: Tensor | None) -> dict[str, Tensor]:
        return {"weight_shape": torch.tensor(shape)}

    def _accept(self, leaf: str, tensor: Tensor) -> Tensor:
        return tensor.to(torch.int64) if leaf == "weight_shape" and tensor.dtype is torch.int32 else tensor

    def _check_values(self, name: str, stored: Mapping[str, Tensor]) -> None:
        low, high = (x.item() for x in torch.aminmax(stored["weight_scale"]))
        if not (low >= 0 and high < math.inf):
            raise ValueError(f"{name}.weight_scale: scales must be finite and not negative: fetch the checkpoint again")

    def _check_whole(self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
        given = stored["weight_shape"].tolist()
        if given != list(shape):
            raise ValueError(
                f"{name}.weight_shape is {given}, but {name}.weight_packed has {list(shape)}: fetch the "
                "checkpoint again"
            )

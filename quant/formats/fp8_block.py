"""DeepSeek-V3's FP8: e4m3 codes and one fp32 scale per block of a weight, with `fp8-ue8m0` a power of two.

Letters: B weights of one shape, r rows (out) and c columns (in) of a tile, bn x bk a block.

Encode: s = max(amax, 1e-10) / 448 over the block, code = e4m3(w / s), a true division, rounded to nearest even. Decode:
fp32(code) * s. The scale is stored as `weight_scale_inv`, although decoding multiplies by it (DeepSeek-V3,
README_WEIGHTS; the formula of its `weight_dequant` kernel). UE8M0 rounds s up to a power of two through its bits, like
DeepGEMM's `ceil_to_ue8m0`: log2 in fp32 is wrong next to powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quant.formats.codec import PerBlock
from quant.formats.e4m3 import E4m3Codec, within_e4m3
from quant.formats.scale_rules import E4M3_MAX, ZERO_BLOCK_AMAX
from quant.formats.tiles import divide_
from quant.spec import QuantFormat, QuantSpec

SCALES = "weight_scale_inv"


def ceil_to_power_of_two(s: Tensor) -> Tensor:
    """fp32, positive and finite -> the least power of two that is not smaller, between 2^-126 and 2^127."""
    bits = s.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


class Fp8BlockCodec(E4m3Codec):
    """The codec of `QuantFormat.FP8` and `QuantFormat.FP8_UE8M0`."""

    def __init__(self, spec: QuantSpec) -> None:
        if spec.format not in (QuantFormat.FP8, QuantFormat.FP8_UE8M0):
            raise ValueError(f"the FP8 codec does not support a spec of format {spec.format}")
        super().__init__(spec)
        bn, bk = self.block
        self.stored = {"weight": PerBlock(torch.float8_e4m3fn), SCALES: PerBlock(torch.float32, bn, bk)}

    def _choose(self, w: Tensor, bits: Tensor, top: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        scales = divide_(bits.view(torch.bfloat16).float().clamp_(min=ZERO_BLOCK_AMAX), E4M3_MAX)
        if self.spec.format is QuantFormat.FP8_UE8M0:
            scales, w = ceil_to_power_of_two(scales), within_e4m3(w, bits)
        x = w.to(torch.float32, memory_format=torch.contiguous_format)
        blocks, s = _blocks(x, scales)
        blocks.div_(s)  # at most 448 up to one rounding error, which the cast removes: no clamp is needed
        return x, (scales,)

    def _scaled(self, levels: Tensor, scales: tuple[Tensor, ...], top: Tensor | None, dtype: torch.dtype) -> Tensor:
        blocks, s = _blocks(levels, scales[0])
        blocks.mul_(s)
        return levels

    def _accept(self, leaf: str, tensor: Tensor) -> Tensor:
        return tensor.to(torch.float32) if leaf == SCALES and tensor.dtype is torch.bfloat16 else tensor

    def _check_values(self, name: str, stored: Mapping[str, Tensor]) -> None:
        scales = stored[SCALES]
        low, high = (x.item() for x in torch.aminmax(scales))  # either is NaN when one scale is
        if not (low >= 0 and high < math.inf):
            raise ValueError(f"{name}.{SCALES}: scales must be finite and not negative: fetch the checkpoint again")
        if self.spec.format is QuantFormat.FP8_UE8M0 and bool((scales.view(torch.int32) & 0x7FFFFF).any()):
            raise ValueError(
                f"{name}.{SCALES}: scales are not powers of two, but config.json has scale_fmt = 'ue8m0': check "
                "that it belongs to these weights"
            )
        super()._check_values(name, stored)


def _blocks(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, r, c] viewed as blocks, and scales [B, r/bn, c/bk] broadcastable to them."""
    b, r, c = x.shape
    nb, kb = scales.shape[1:]
    return x.view(b, nb, r // nb, kb, c // kb), scales[:, :, None, :, None]

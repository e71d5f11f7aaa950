"""OCP Microscaling: one power-of-two scale per 32 columns of a row; e4m3 codes (MXFP8) or e2m1 codes (MXFP4).

Letters: B weights of one shape, r rows (out) and c columns (in) of a tile; a group is 32 columns.

The scale's code b means 2^(b - 127) and is computed from the bits of the group's amax, never by log2:
MXFP8  the least power of two not below amax / 448, so that nothing saturates (Transformer Engine's rule);
MXFP4  2^(floor(log2 amax) - 2): values above 6 times the scale saturate (OCP's rule, nearer on Gaussian weights).
Both are bounded below by b = 0, 2^-127, which is also the scale of a group of zeros. Code = round(w / 2^(b - 127)) to
nearest even, decode = code * 2^(b - 127); neither the quotient nor the product is rounded.

Stored: MXFP8 `weight` e4m3 [n, k] and `weight_scale_inv` uint8 [n, k / 32] (SGLang), or `weight_scale`
(compressed-tensors); MXFP4 `weight_packed` uint8 [n, k / 2], the even column in the low nibble, and `weight_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quant.formats.codec import Codec, PerBlock
from quant.formats.e2m1 import E2m1Codec, e2m1_codes
from quant.formats.e4m3 import E4m3Codec, within_e4m3
from quant.formats.minifloat import e8m0_decode
from quant.formats.scale_rules import ABOVE_448
from quant.formats.tiles import groups
from quant.spec import QuantFormat, QuantSpec

GROUP = 32
_MANTISSA_BITS = 7  # of bf16
_INVERSE = 254  # codes b and 254 - b stand for reciprocals


class _MxCodec(Codec):
    format: QuantFormat
    greatest: int  # the largest code of a scale that a finite weight can have

    def __init__(self, spec: QuantSpec) -> None:
        if spec.format is not self.format:
            raise ValueError(f"the {self.format} codec does not support a spec of format {spec.format}")
        super().__init__(spec)
        self.scales = "weight_scale_inv" if spec.convention == "sglang" else "weight_scale"

    def _scaled(self, levels: Tensor, scales: tuple[Tensor, ...], top: Tensor | None, dtype: torch.dtype) -> Tensor:
        groups(levels, GROUP).mul_(e8m0_decode(scales[0])[..., None])
        return levels

    def _accept(self, leaf: str, tensor: Tensor) -> Tensor:
        return tensor.view(torch.uint8) if leaf == self.scales and tensor.dtype is torch.float8_e8m0fnu else tensor

    def _check_values(self, name: str, stored: Mapping[str, Tensor]) -> None:
        super()._check_values(name, stored)
        code = int(stored[self.scales].max())
        if code > self.greatest:
            raise ValueError(
                f"{name}.{self.scales}: scale code {code} is NaN (255) or too large for a finite weight (above "
                f"{self.greatest}): fetch the checkpoint again"
            )


class Mxfp8Codec(_MxCodec, E4m3Codec):
    """The codec of `QuantFormat.MXFP8`."""

    format = QuantFormat.MXFP8
    greatest = 247

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(spec)
        self.stored = {"weight": PerBlock(torch.float8_e4m3fn), self.scales: PerBlock(torch.uint8, 1, GROUP)}

    def _choose(self, w: Tensor, bits: Tensor, top: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        codes = ((bits + ABOVE_448) >> _MANTISSA_BITS).sub_(8).clamp_(min=0).to(torch.uint8)
        return _divided(within_e4m3(w, bits), codes), (codes,)


class Mxfp4Codec(_MxCodec, E2m1Codec):
    """The codec of `QuantFormat.MXFP4`."""

    format = QuantFormat.MXFP4
    greatest = 252

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(spec)
        self.stored = {"weight_packed": PerBlock(torch.uint8, 1, 2), self.scales: PerBlock(torch.uint8, 1, GROUP)}

    def _choose(self, w: Tensor, bits: Tensor, top: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        codes = (bits >> _MANTISSA_BITS).sub_(2).clamp_(min=0).to(torch.uint8)
        return e2m1_codes(w, _divided(w, codes)), (codes,)


def _divided(w: Tensor, codes: Tensor) -> Tensor:
    """bf16 [B, r, c] divided by the scales of codes [B, r, c / 32]: fp32, exact, as reciprocals are powers of two."""
    x = w.to(torch.float32, memory_format=torch.contiguous_format)
    groups(x, GROUP).mul_(e8m0_decode(_INVERSE - codes)[..., None])
    return x

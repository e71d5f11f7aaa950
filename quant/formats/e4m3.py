"""Fast e4m3 codes (eight-bit floats) for block FP8 and MXFP8."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quant.formats.codec import Codec
from quant.formats.lookup import e4m3_values
from quant.formats.scale_rules import E4M3_FINITE

_INFINITE_BITS = 0x7F78  # of 1.9375 * 2^127 in bf16


def within_e4m3(w: Tensor, bits: Tensor) -> Tensor:
    """bf16 weights and the bits of their blocks' amax -> weights clamped so that none overflows with power-of-two
    scales: from 1.9375 * 2^127 on e4m3 rounds up to 2^128."""
    return w.clamp(-E4M3_FINITE, E4M3_FINITE) if int(bits.max()) >= _INFINITE_BITS else w


class E4m3Codec(Codec):
    """e4m3 codes, stored as `weight`. The cast of the fp32 quotients to the stored dtype rounds them."""

    def _pack(self, codes: Tensor) -> Tensor:
        return codes

    def _levels(self, codes: Tensor) -> Tensor:
        return e4m3_values(codes.to(torch.float8_e4m3fn))

    def _unpack(self, packed: Tensor) -> Tensor:
        return e4m3_values(packed)

    def _check_values(self, name: str, stored: Mapping[str, Tensor]) -> None:
        super()._check_values(name, stored)
        if int((stored["weight"].view(torch.uint8) & 0x7F).max()) == 0x7F:
            raise ValueError(f"{name}.weight has NaN codes: fetch the checkpoint again")

"""Eight-bit floats by the tile: what block FP8 and MXFP8 share. The definition is `minifloat.e4m3_encode`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quant.codec import Codec
from quant.lookup import e4m3_values

_FINITE = 1.875 * 2.0**127
_INFINITE_BITS = 0x7F78  # of 1.9375 * 2^127 in bf16


def within_e4m3(w: Tensor, bits: Tensor) -> Tensor:
    """bf16 weights, and the bits of their blocks' amax -> the same, but none that power-of-two scales make infinite.

    From 1.9375 * 2^127 on e4m3 rounds up to 2^128.
    """
    return w.clamp(-_FINITE, _FINITE) if int(bits.max()) >= _INFINITE_BITS else w


class E4m3Codec(Codec):
    """Codes e4m3 of quotients fp32, which the cast to what is stored rounds; stored as `weight`."""

    def _pack(self, codes: Tensor) -> Tensor:
        return codes

    def _levels(self, codes: Tensor) -> Tensor:
        return e4m3_values(codes.to(torch.float8_e4m3fn))

    def _unpack(self, packed: Tensor) -> Tensor:
        return e4m3_values(packed)

    def _check_values(self, name: str, parts: Mapping[str, Tensor]) -> None:
        super()._check_values(name, parts)
        if int((parts["weight"].view(torch.uint8) & 0x7F).max()) == 0x7F:
            raise ValueError(f"{name}.weight: codes that are NaN: fetch the checkpoint again")

"""Which codec a format has."""

from __future__ import annotations

from collections.abc import Callable

from quant.codec import Codec
from quant.fp8_block import Fp8BlockCodec
from quant.spec import QuantFormat, QuantSpec

CODECS: dict[QuantFormat, Callable[[QuantSpec], Codec]] = {QuantFormat.FP8: Fp8BlockCodec}


def make_codec(spec: QuantSpec) -> Codec:
    """The codec of `spec.format`. Raises ValueError for a format that has none (bf16 is stored as it is)."""
    if spec.format not in CODECS:
        raise ValueError(f"format {spec.format} has no codec; those that have: {', '.join(CODECS)}")
    return CODECS[spec.format](spec)

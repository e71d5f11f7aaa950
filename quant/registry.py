"""The codec of each format."""

from __future__ import annotations

from collections.abc import Callable

from quant.formats.codec import Codec
from quant.formats.fp8_block import Fp8BlockCodec
from quant.formats.int4 import Int4Codec
from quant.formats.mxfp import Mxfp4Codec, Mxfp8Codec
from quant.formats.nvfp4 import Nvfp4Codec
from quant.spec import QuantFormat, QuantSpec

CODECS: dict[QuantFormat, Callable[[QuantSpec], Codec]] = {
    QuantFormat.FP8: Fp8BlockCodec,
    QuantFormat.FP8_UE8M0: Fp8BlockCodec,
    QuantFormat.INT4: Int4Codec,
    QuantFormat.MXFP8: Mxfp8Codec,
    QuantFormat.MXFP4: Mxfp4Codec,
    QuantFormat.NVFP4: Nvfp4Codec,
}


def make_codec(spec: QuantSpec) -> Codec:
    """The codec of `spec.format`. Raises ValueError for a format that has none (bf16 is stored as it is)."""
    if spec.format not in CODECS:
        raise ValueError(f"format {spec.format} has no codec; those that have: {', '.join(CODECS)}")
    return CODECS[spec.format](spec)


def codec_or_none(spec: QuantSpec | None) -> Codec | None:
    """None for weights that are not quantized."""
    return None if spec is None or spec.format is QuantFormat.BF16 else make_codec(spec)

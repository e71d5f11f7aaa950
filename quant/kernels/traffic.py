"""Bytes that the codecs' kernels move to and from a device's memory, and the least time that they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quant.spec import QuantFormat, QuantSpec

_BF16 = 2.0
# bits of a code and of a scale, which belongs to one block
_BITS = {
    QuantFormat.FP8: (8, 32),
    QuantFormat.FP8_UE8M0: (8, 32),
    QuantFormat.INT4: (4, 16),
    QuantFormat.MXFP8: (8, 8),
    QuantFormat.MXFP4: (4, 8),
    QuantFormat.NVFP4: (4, 8),
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes for each weight. needed: what is read or written at least once, when the codec is given no amax; moved:
    with what a kernel reads a second time."""

    format: QuantFormat
    work: str  # encode, fake or decode
    needed: float
    moved: float

    def seconds(self, weights: int, bandwidth: float) -> float:
        """The least time for `weights` weights at `bandwidth` bytes/s."""
        return weights * self.moved / bandwidth


def traffics() -> Iterator[Traffic]:
    """Of each format's default block."""
    for fmt, (code, scale) in _BITS.items():
        rows, columns = QuantSpec(format=fmt).block
        stored = (code + scale / (rows * columns)) / 8
        # NVFP4's scale of the weight is known when all of it was read
        again = _BF16 if fmt is QuantFormat.NVFP4 else 0.0
        yield Traffic(fmt, "encode", _BF16 + stored, _BF16 + stored + again)
        yield Traffic(fmt, "fake", 2 * _BF16, 2 * _BF16 + again)
        yield Traffic(fmt, "decode", _BF16 + stored, _BF16 + stored)


def table(weights: int, bandwidths: Mapping[str, float]) -> list[str]:
    """Rows of a Markdown table: bytes, and microseconds for `weights` weights at devices' `bandwidths`, bytes/s."""
    rows = [
        f"| | bytes moved for each weight | over bytes needed | {' | '.join(f'{d}, µs' for d in bandwidths)} |",
        "|---" * (3 + len(bandwidths)) + "|",
    ]
    for t in traffics():
        times = " | ".join(f"{t.seconds(weights, rate) * 1e6:.1f}" for rate in bandwidths.values())
        rows.append(f"| {t.format} {t.work} | {t.moved:.3f} | {t.moved / t.needed:.2f} | {times} |")
    return rows

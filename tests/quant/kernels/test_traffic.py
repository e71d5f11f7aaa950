"""The bytes that kernels are held to are those that codecs store, and the table of the page is made of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from miles_like.device_table import DEVICES
from quant.formats.codec import PerBlock
from quant.kernels.traffic import Traffic, table, traffics
from quant.registry import CODECS, make_codec
from quant.spec import QuantFormat, QuantSpec

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
EXPERT = (2048, 7168)  # of DeepSeek-V3


def of(fmt: QuantFormat) -> dict[str, Traffic]:
    return {t.work: t for t in traffics() if t.format is fmt}


@pytest.mark.parametrize("fmt", list(CODECS), ids=str)
def test_bytes_are_those_of_the_weight_and_of_what_is_stored(fmt: QuantFormat) -> None:
    codec = make_codec(QuantSpec(format=fmt))
    layout = codec.layout(EXPERT)
    stored = sum(
        math.prod(layout[leaf][1]) * layout[leaf][0].itemsize
        for leaf, kind in codec.stored.items()
        if isinstance(kind, PerBlock)
    )
    found, weights = of(fmt), math.prod(EXPERT)
    assert found["encode"].needed * weights == found["decode"].moved * weights == 2 * weights + stored
    assert found["fake"].needed == 4
    read_twice = 2.0 if codec.shared_amax else 0.0
    assert found["encode"].moved - found["encode"].needed == found["fake"].moved - 4 == read_twice


def test_seconds_are_bytes_over_the_bandwidth() -> None:
    assert of(QuantFormat.INT4)["encode"].seconds(1000, 2.5625e9) == pytest.approx(1e-6)


def test_the_page_has_the_table() -> None:
    bandwidths = {name: DEVICES[name].hbm for name in ("H100", "H200", "B200")}
    assert "\n".join(table(math.prod(EXPERT), bandwidths)) in PAGE.read_text()

"""Codes become values by their bits: as `minifloat` defines them, for every code and from every memory."""

from __future__ import annotations

import threading

import pytest
import torch

from quant.formats import tiles
from quant.formats.lookup import e2m1_values, e4m3_values, int4_values, pack_nibbles
from quant.registry import CODECS, make_codec
from quant.spec import QuantFormat, QuantSpec
from tests.support.minifloat_rounding import e2m1_decode, e4m3_decode

BYTES = torch.arange(256, dtype=torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit: a zero has a sign."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def test_every_e4m3_code() -> None:
    """NaN apart, which no codec writes or adopts."""
    codes = BYTES[(BYTES & 0x7F) != 0x7F]
    assert same(e4m3_values(codes), e4m3_decode(codes))
    assert same(e4m3_values(codes.view(torch.float8_e4m3fn)), codes.view(torch.float8_e4m3fn).float())


def test_every_pair_of_nibbles() -> None:
    pairs = torch.stack([BYTES & 15, BYTES >> 4], 1).flatten()
    assert torch.equal(pack_nibbles(pairs), BYTES)
    assert same(e2m1_values(BYTES), e2m1_decode(pairs))
    assert same(int4_values(BYTES), pairs.float() - 8)


@pytest.mark.parametrize("values", [e4m3_values, e2m1_values, int4_values])
def test_codes_lie_anywhere_in_memory(values: object) -> None:
    """A tile of codes starts at any byte: an odd number of columns, or of rows in a stack."""
    assert callable(values)
    codes = (torch.arange(7 * 33) % 120).to(torch.uint8).view(7, 33)
    for part in (codes[1:, :], codes[3:4, 5:], codes[:, 1:4], codes.T):
        assert same(values(part), values(part.contiguous().clone()))


@pytest.mark.parametrize("fmt", list(CODECS))
def test_threads_and_tiles_change_nothing(fmt: QuantFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are those of one thread and one tile, and PyTorch's threads stay as they were, in new threads too.

    Not covered: more threads than cores.
    """
    codec = make_codec(QuantSpec(format=fmt))
    g = torch.Generator().manual_seed(0)
    bundle = {f"m.{i}.down_proj.weight": torch.randn(n, 320, generator=g) for i, n in enumerate((300, 24, 24, 24, 1))}
    encoded = codec.encode(bundle)
    before = torch.get_num_threads()
    seen: list[int] = []
    try:
        for threads, elements in ((2, 1 << 18), (1, 1 << 11), (2, 1 << 13)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(tiles, "CPU_ELEMENTS", elements)
            fake = codec.fake(bundle)
            for name, q in codec.encode(bundle).items():
                for leaf, part in q.stored.items():
                    assert torch.equal(
                        part.flatten().view(torch.uint8), encoded[name].stored[leaf].flatten().view(torch.uint8)
                    )
                assert torch.equal(codec.decode(q).view(torch.int16), fake[name].view(torch.int16))
            fresh = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            fresh.start()
            fresh.join()
            assert seen[-1] == torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)

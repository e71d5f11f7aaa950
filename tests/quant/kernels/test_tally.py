"""What encoded the weights of a publication. Not covered: a device, where Triton does (tests/gpu)."""

from __future__ import annotations

import torch

from quant.kernels.tally import ENCODED, Tally
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec


def test_encoding_on_a_cpu_is_pytorchs() -> None:
    before = ENCODED.now()
    make_codec(QuantSpec(format=QuantFormat.INT4)).encode({f"{i}.weight": torch.ones(3, 64) for i in range(2)})
    assert (ENCODED.torch - before.torch, ENCODED.triton - before.triton) == (2 * 3 * 64, 0)
    assert ENCODED.share_since(before) == 0.0


def test_the_share_is_of_what_was_encoded_since() -> None:
    tally = Tally(triton=5, torch=100)
    before = tally.now()
    assert tally.share_since(before) is None
    tally.triton += 30
    tally.torch += 10
    assert tally.share_since(before) == 0.75

"""NVFP4: known vectors in both conventions, the shared scale, edges, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quant.formats.codec import Codec
from quant.formats.nvfp4 import Nvfp4Codec
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec
from quant.stream import pair_stream, quantize_stream
from tests.support.minifloat_rounding import e2m1_decode
from tests.support.refusals import refuses

CT = make_codec(QuantSpec(format=QuantFormat.NVFP4, convention="compressed-tensors"))
MODELOPT = make_codec(QuantSpec(format=QuantFormat.NVFP4, convention="modelopt"))
GATE, UP, DOWN = (f"model.layers.1.mlp.experts.3.{p}_proj.weight" for p in ("gate", "up", "down"))


def known() -> Tensor:
    """One row, two groups: the largest weight is 42, so S = 1/64; the second group's scale is 1/4, worked by hand."""
    w = torch.zeros(1, 32, dtype=torch.bfloat16)
    w[0, :4] = torch.tensor([42.0, -28.0, 7.0, 3.5])  # s = 448, s * S = 7: 6, -4, 1, 1/2
    w[0, 16:20] = torch.tensor([6.0, -2.0, 1.0, 0.5]) / 256  # s = 6 / 256 / 6 * 64 = 1 / 4, s * S = 2^-8
    return w


@pytest.mark.parametrize("codec", [CT, MODELOPT], ids=["compressed-tensors", "modelopt"])
def test_known_vector(codec: Codec) -> None:
    """One stores 64, to divide by, the other 1/64, to multiply with; mixed up, weights would be off by 4096."""
    q = codec.encode({"w": known()})["w"]
    codes, *rest = q.stored
    assert q.stored[codes][0].tolist() == [0xE7, 0x12, 0, 0, 0, 0, 0, 0, 0xC7, 0x12, 0, 0, 0, 0, 0, 0]
    assert q.stored["weight_scale"].float().tolist() == [[448.0, 0.25]]
    if codec is CT:
        assert (codes, rest) == ("weight_packed", ["weight_scale", "weight_global_scale"])
        assert q.stored["weight_global_scale"].tolist() == [64.0]
    else:
        assert (codes, rest) == ("weight", ["weight_scale", "weight_scale_2", "input_scale"])
        assert q.stored["weight_scale_2"].shape == q.stored["input_scale"].shape == ()
        assert (float(q.stored["weight_scale_2"]), float(q.stored["input_scale"])) == (1 / 64, 1.0)
    assert {p.dtype for p in q.stored.values()} <= {torch.uint8, torch.float8_e4m3fn, torch.float32}
    assert torch.equal(codec.decode(q, torch.float32), known().float())


@pytest.mark.parametrize("codec", [CT, MODELOPT], ids=["compressed-tensors", "modelopt"])
def test_gate_and_up_share_one_scale(codec: Codec) -> None:
    """Engines multiply both by one kernel, which takes one number and ignores the other's."""
    w = {GATE: torch.randn(8, 32), UP: torch.randn(8, 32) * 9, DOWN: torch.randn(32, 16) * 50}
    assert codec.bundle_of(GATE) == codec.bundle_of(UP) == (GATE, UP) and codec.bundle_of(DOWN) == (DOWN,)
    whole = "weight_global_scale" if codec is CT else "weight_scale_2"
    q = codec.encode(w)
    assert torch.equal(q[GATE].stored[whole], q[UP].stored[whole])
    assert not torch.equal(q[GATE].stored[whole], q[DOWN].stored[whole])
    with refuses(ValueError, GATE, UP):
        codec.encode({GATE: w[GATE]})
    top = torch.stack([codec.amax(w[GATE]), codec.amax(w[UP])]).max()
    alone = codec.encode({GATE: w[GATE]}, {GATE: top})[GATE]  # as a rank that holds the gate alone
    assert all(
        torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
        for a, b in zip(alone.stored.values(), q[GATE].stored.values(), strict=True)
    )
    assert torch.equal(codec.fake({UP: w[UP]}, {UP: top})[UP], codec.decode(q[UP]))


@pytest.mark.parametrize("codec", [CT, MODELOPT], ids=["compressed-tensors", "modelopt"])
def test_zeros_and_groups_that_vanish(codec: Codec) -> None:
    """Nothing is divided by zero: weights of zeros have S = 1, a group 1e7 below the largest weight has scale 0."""
    q = codec.encode({"w": torch.zeros(2, 32)})["w"]
    whole = "weight_global_scale" if codec is CT else "weight_scale_2"
    assert float(q.stored[whole]) == 1.0 and not codec.decode(q).any()
    w = torch.ones(1, 32) * 1e-6
    w[0, 0] = -10.0
    q = codec.encode({"w": w})["w"]
    assert q.stored["weight_scale"].float()[0, 1] == 0
    assert next(iter(q.stored.values()))[0].tolist() == [0x0F, *[0] * 15]
    assert codec.decode(q)[0].tolist() == [-10.0] + [0.0] * 31


@pytest.mark.parametrize("codec", [CT, MODELOPT], ids=["compressed-tensors", "modelopt"])
def test_the_product_is_taken_in_one_order(codec: Codec) -> None:
    """Code times (block scale and the number of the weight), by a true division where that number divides."""
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)) * 0.02
    q = codec.encode({"w": w})["w"]
    codes, scales, whole, *_ = q.stored.values()
    s = scales.float() / whole if codec is CT else scales.float() * whole
    values = e2m1_decode(torch.stack([codes & 15, codes >> 4], -1).view(64, 64))
    assert torch.equal(codec.decode(q, torch.float32), values * s.repeat_interleave(16, 1))


def test_every_magnitude_decodes_to_a_finite_number() -> None:
    """2688 / amax is infinite below 1e-35, amax / 2688 is subnormal; the largest weight stays near itself."""
    for bits in [*range(1, 0x7F80, 131), 0x7F7F]:
        amax = torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16)
        w = torch.zeros(1, 32, dtype=torch.bfloat16)
        w[0, 5], w[0, 20] = amax, -amax
        for codec in (CT, MODELOPT):
            d = codec.fake({"w": w})["w"].double()
            assert torch.equal(d[0, 5], -d[0, 20])
            assert float((d[0, 5] / amax.double() - 1).abs()) < (1e-2 if amax > 1e-35 else 0.3)


def test_input_scales_are_written_and_not_read() -> None:
    """They are for activations: engines need ModelOpt's to be there, and W4A4 checkpoints have others."""
    spec = QuantSpec.of(QuantFormat.NVFP4, convention="modelopt")
    w = [(GATE, torch.randn(4, 32)), (DOWN, torch.randn(4, 16)), (UP, torch.randn(4, 32))]
    stored = dict(quantize_stream(w, spec))
    assert list(stored)[:4] == [DOWN.replace("weight", leaf) for leaf in MODELOPT.stored]  # UP came last of its bundle
    want = dict(pair_stream(stored.items(), spec))
    for given in (
        {n: t * 0 + 7 if n.endswith("input_scale") else t for n, t in stored.items()},
        {n: t for n, t in stored.items() if not n.endswith("input_scale")},
        dict(reversed(stored.items())),
    ):
        found = dict(pair_stream(given.items(), spec))
        assert set(found) == set(want)
        assert all(torch.equal(MODELOPT.decode(found[n]), MODELOPT.decode(q)) for n, q in want.items())
        assert all(float(q.stored["input_scale"]) == 1 for q in found.values())
    spec = QuantSpec.of(QuantFormat.NVFP4)
    stored = dict(quantize_stream(w, spec)) | {DOWN.replace("weight", "input_global_scale"): torch.ones(1)}
    assert set(dict(pair_stream(stored.items(), spec))) == {GATE, UP, DOWN}


@pytest.mark.parametrize("codec", [CT, MODELOPT], ids=["compressed-tensors", "modelopt"])
def test_what_no_encoder_writes_is_refused(codec: Codec) -> None:
    """Numbers that would make weights NaN, infinite or of the wrong sign."""
    q = codec.encode({"w": known()})["w"]
    whole = "weight_global_scale" if codec is CT else "weight_scale_2"
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with refuses(ValueError, f"m.{whole}"):
            codec.adopt("m.weight", {**q.stored, whole: q.stored[whole] * 0 + bad})
    for bad in (float("nan"), -1.0):
        with refuses(ValueError, "m.weight_scale"):
            codec.adopt("m.weight", {**q.stored, "weight_scale": torch.full((1, 2), bad).to(torch.float8_e4m3fn)})
    for shape in ((), (1,), (1, 1)):
        assert torch.equal(
            codec.decode(codec.adopt("m.weight", {**q.stored, whole: q.stored[whole].view(shape)})), known()
        )
    with refuses(ValueError, "bf16"):
        Nvfp4Codec(QuantSpec(format=QuantFormat.BF16))

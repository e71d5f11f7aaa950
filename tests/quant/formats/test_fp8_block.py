"""The FP8 block codec: golden values, edges, other people's formulas, refusals."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from quant.formats.codec import QuantTensor
from quant.formats.fp8_block import Fp8BlockCodec, ceil_to_power_of_two
from quant.registry import CODECS, make_codec
from quant.spec import QuantFormat, QuantSpec
from tests.support.minifloat_rounding import e4m3_decode, e4m3_encode
from tests.support.refusals import refuses

CODEC = make_codec(QuantSpec(format=QuantFormat.FP8))
SMALL = Fp8BlockCodec(QuantSpec(format=QuantFormat.FP8, block=(4, 8)))


def encode(w: Tensor, codec: Fp8BlockCodec = SMALL) -> QuantTensor:
    return codec.encode({"w": w})["w"]


def reference(w: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Block by block with our own integer rounding: codes uint8 and scales, nothing shared with the codec."""
    w = w.to(torch.bfloat16)
    n, k = w.shape
    bn, bk = block
    codes = torch.empty(n, k, dtype=torch.uint8)
    scales = torch.empty(-(-n // bn), -(-k // bk))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = w[i * bn : (i + 1) * bn, j * bk : (j + 1) * bk].float()
            s = torch.maximum(part.abs().max(), torch.tensor(1e-10)) / 448
            scales[i, j] = s
            codes[i * bn : (i + 1) * bn, j * bk : (j + 1) * bk] = e4m3_encode(part / s)
    return codes, scales


def test_golden_block() -> None:
    """Worked by hand: amax 448 gives scale 1, so codes are those of the values themselves, ties to even included."""
    w = torch.zeros(4, 8)
    w[0] = torch.tensor([448.0, -448.0, 1.0, -1.0, 0.5, 17.0, 19.0, 2**-9])
    q = encode(w)
    assert q.stored["weight_scale_inv"].tolist() == [[1.0]]
    assert q.stored["weight"].view(torch.uint8)[0].tolist() == [0x7E, 0xFE, 0x38, 0xB8, 0x30, 0x58, 0x5A, 0x01]
    assert torch.equal(q.stored["weight"].view(torch.uint8)[1:], torch.zeros(3, 8, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("shape", "block"),
    [((4, 8), (4, 8)), ((9, 17), (4, 8)), ((3, 5), (4, 8)), ((1, 40), (4, 8)), ((130, 300), (128, 128))],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_a_loop_over_blocks(shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype) -> None:
    """The vectorised codec against the definition, ragged edges included, codes and scales compared as bits."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    q = encode(w, Fp8BlockCodec(QuantSpec(format=QuantFormat.FP8, block=block)))
    codes, scales = reference(w, block)
    assert torch.equal(q.stored["weight"].view(torch.uint8), codes)
    assert torch.equal(q.stored["weight_scale_inv"], scales)


def test_scaling_is_a_true_division() -> None:
    """w * (1 / s) rounds twice and misses ties. With amax = 7m the scale is m / 64, and 17m / 64 lies at 17, midway.

    17, 19, ... 31 lie between the grid's 16, 18, ... 32 and must go to every other of them, whatever m is.
    """
    missed = 0
    for m in range(1, 8, 2):
        w = torch.zeros(4, 8)
        w[0, 0] = 7 * m
        w[1] = torch.arange(17, 33, 2) * m / 64
        q = encode(w.to(torch.bfloat16))
        assert torch.equal(w.to(torch.bfloat16).float(), w) and q.stored["weight_scale_inv"].tolist() == [[m / 64]]
        assert q.stored["weight"].float()[1].tolist() == [16, 20, 20, 24, 24, 28, 28, 32]
        missed += int((e4m3_encode(w[1] * (1 / torch.tensor(m / 64))) != q.stored["weight"].view(torch.uint8)[1]).sum())
    assert missed > 0


def test_a_weight_larger_than_the_working_band() -> None:
    """Large weights are worked on in bands of rows; a seam in the wrong place would shift scales."""
    w = (torch.randn(700, 8192, generator=torch.Generator().manual_seed(3)) * 0.02).to(torch.bfloat16)
    q = encode(w, CODEC)
    for rows in (slice(0, 128), slice(384, 640), slice(640, 700)):
        part = encode(w[rows], CODEC)
        assert torch.equal(q.stored["weight"][rows].view(torch.uint8), part.stored["weight"].view(torch.uint8))
        assert torch.equal(CODEC.decode(q)[rows], CODEC.decode(part))


def test_scale_shape_of_deepseeks_kv_projection() -> None:
    """576 x 7168 is DeepSeek-V3's `kv_a_proj_with_mqa`; the checkpoint's scales are 5 x 56."""
    q = encode(torch.ones(576, 7168, dtype=torch.bfloat16), CODEC)
    assert q.stored["weight_scale_inv"].shape == (5, 56)
    assert q.stored["weight_scale_inv"].dtype is torch.float32
    assert q.shape == (576, 7168) and q.nbytes == 576 * 7168 + 5 * 56 * 4


def test_a_block_of_zeros_decodes_to_zero() -> None:
    """0 / 0 would be NaN weights, as in converters that do not bound amax from below."""
    q = encode(torch.zeros(5, 9))
    assert bool((q.stored["weight_scale_inv"] > 0).all())
    assert torch.equal(SMALL.decode(q), torch.zeros(5, 9))


def test_tiny_and_huge_weights_stay_finite() -> None:
    """Scales of subnormal weights must not underflow to 0, products of the largest fp32 must not overflow."""
    for value in (2**-149, 1e-30, 3.0e38):
        decoded = SMALL.decode(encode(torch.full((4, 8), value)))
        assert bool(torch.isfinite(decoded).all())
        assert value < 1e-20 or bool((decoded / value - 1).abs().max() < 1e-6)


def test_padding_does_not_touch_the_last_blocks_scale() -> None:
    """The scale of a ragged block depends on its entries alone, however small."""
    w = torch.full((5, 9), 1e-3)
    assert torch.unique(encode(w).stored["weight_scale_inv"]).numel() == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    """The cast would saturate an infinity silently; the second weight of a bundle must be the one that is named."""
    w = torch.randn(9, 17)
    broken = w.clone()
    broken[8, 16] = bad
    with refuses(ValueError, "layers.1.q_proj.weight"):
        SMALL.encode({"layers.0.q_proj.weight": w, "layers.1.q_proj.weight": broken})


@pytest.mark.parametrize("w", [torch.zeros(4), torch.zeros(2, 2, 2), torch.zeros(2, 2, dtype=torch.int32)])
def test_a_weight_that_is_no_float_matrix_is_refused(w: Tensor) -> None:
    """The caller chose the wrong tensor; say which."""
    with refuses(ValueError, "name.it"):
        SMALL.encode({"name.it": w})


def ue8m0(amax: Tensor) -> Tensor:
    """Scales of blocks of one element."""
    spec = QuantSpec(format=QuantFormat.FP8_UE8M0, block=(1, 1))
    return make_codec(spec).encode({"w": amax[None]})["w"].stored["weight_scale_inv"][0]


def test_power_of_two_scales_by_bits() -> None:
    """The least power of two not below amax / 448, beside every 448 * 2^k too: in integers it is exact.

    log2 in fp32 is not: it takes the next number above 2^k for 2^k itself.
    """
    exponents = range(-34, 119)
    at = torch.tensor([448 * 2.0**k for k in exponents], dtype=torch.bfloat16)
    below, above = ((at.view(torch.int16) + d).view(torch.bfloat16) for d in (-1, 1))
    want = torch.tensor([2.0**k for k in exponents])
    assert torch.equal(ue8m0(at), want) and torch.equal(ue8m0(below), want) and torch.equal(ue8m0(above), 2 * want)

    s = torch.cat([(want.view(torch.int32) + d).view(torch.float32) for d in (-1, 0, 1)])
    by_bits = ceil_to_power_of_two(s)
    assert by_bits.tolist() == [2.0 ** math.ceil(_log2(float(x))) for x in s]
    assert int((torch.exp2(torch.ceil(torch.log2(s))) != by_bits).sum()) > len(exponents) // 2


def _log2(x: float) -> Fraction:
    """Of an fp32 number, near enough in rational arithmetic that its ceiling is right."""
    mantissa, exponent = math.frexp(x)
    return Fraction(exponent) - (1 if mantissa == 0.5 else Fraction(1, 2))


def test_power_of_two_scales_are_said_and_checked() -> None:
    """config.json says ue8m0; a scale that is none would be rounded by the engine, silently."""
    codec = make_codec(QuantSpec(format=QuantFormat.FP8_UE8M0, block=(4, 8)))
    q = codec.encode({"w": torch.randn(8, 16)})["w"]
    with refuses(ValueError, "a.b.weight_scale_inv", "ue8m0"):
        codec.adopt("a.b.weight", {**q.stored, "weight_scale_inv": torch.full((2, 2), 0.75)})


def test_the_largest_weights_stay_finite() -> None:
    """With a power of two for a scale, e4m3 would round the largest bf16 numbers up to 2^128."""
    codec = make_codec(QuantSpec(format=QuantFormat.FP8_UE8M0))
    w = torch.tensor([[3.3895e38, -3.3e38, 3.2e38]])
    assert codec.fake({"w": w})["w"].tolist() == [[1.875 * 2.0**127, -1.875 * 2.0**127, 1.875 * 2.0**127]]


def test_many_at_once_are_as_one_by_one() -> None:
    """Weights of one shape are encoded as a stack: none may see another, none may be pickled with all."""
    g = torch.Generator().manual_seed(4)
    many = {f"e{i}": torch.randn(8, 16, generator=g) * 10**i for i in range(-3, 4)}
    many["other"] = torch.randn(5, 3, generator=g)
    together = SMALL.encode(many)
    assert list(together) == list(many)
    for name, w in many.items():
        alone = encode(w)
        assert torch.equal(together[name].stored["weight"].view(torch.uint8), alone.stored["weight"].view(torch.uint8))
        assert torch.equal(together[name].stored["weight_scale_inv"], alone.stored["weight_scale_inv"])
        assert together[name].stored["weight"].untyped_storage().nbytes() == w.numel()


def test_decoding_equals_deepseeks_formula_and_transformers() -> None:
    """transformers dequantizes the same checkpoints; its fp32 result must be ours, bit for bit.

    Its kernel needs whole blocks, so ragged edges are compared with the formula written out by indexing.
    """
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    w = (torch.randn(256, 384, generator=torch.Generator().manual_seed(5)) * 0.03).to(torch.bfloat16)
    q = encode(w, CODEC)
    theirs = _dequantize_fp8_weight(q.stored["weight"], q.stored["weight_scale_inv"], (128, 128), torch.float32)
    assert torch.equal(CODEC.decode(q, torch.float32), theirs)
    assert torch.equal(CODEC.decode(q, torch.bfloat16), theirs.to(torch.bfloat16))

    ragged = encode(torch.randn(200, 300, generator=torch.Generator().manual_seed(6)), CODEC)
    rows, columns = torch.arange(200) // 128, torch.arange(300) // 128
    by_index = (
        e4m3_decode(ragged.stored["weight"].view(torch.uint8)) * ragged.stored["weight_scale_inv"][rows][:, columns]
    )
    assert torch.equal(CODEC.decode(ragged, torch.float32), by_index)


def test_scales_of_a_wrong_shape_are_refused() -> None:
    """Broadcasting would silently accept some of them."""
    q = encode(torch.ones(8, 16))
    wrong = QuantTensor({"weight": q.stored["weight"], "weight_scale_inv": torch.ones(1, 2)}, q.shape)
    with refuses(ValueError, "(1, 2)", "(2, 2)"):
        SMALL.decode(wrong)


def test_registry() -> None:
    """Every quantized format has a codec; bf16 has none and says so."""
    assert set(CODECS) == set(QuantFormat) - {QuantFormat.BF16}
    with refuses(ValueError, "bf16"):
        make_codec(QuantSpec(format=QuantFormat.BF16))
    with refuses(ValueError, "bf16"):
        Fp8BlockCodec(QuantSpec(format=QuantFormat.BF16))
    assert CODEC.bundle_of("a.weight") == ("a.weight",)


def test_a_stack_decodes_as_its_members_do() -> None:
    """The engine decodes its experts together; each must hold the values of its codes. Shapes above a block too."""
    codec = Fp8BlockCodec(QuantSpec(format=QuantFormat.FP8))
    for shape in ((64, 128), (130, 200)):
        ws = {f"w{i}": torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(5)}
        qs = list(codec.encode(ws).values())
        stack = codec.decode_stack(qs, torch.bfloat16)
        assert torch.equal(stack, torch.stack([codec.decode(q, torch.bfloat16) for q in qs]))
    with refuses(ValueError, "[(4, 4), (130, 200)]"):
        codec.decode_stack([qs[0], codec.encode({"x": torch.randn(4, 4)})["x"]])

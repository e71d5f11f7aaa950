"""The codecs' Triton kernels, run by Triton's interpreter on CPU tensors, beside the plain codecs.

    TRITON_INTERPRET=1 python -m tests.support.interpreted_codecs [--whole] CASE...

prints a JSON object, case -> what differs in bits. With --whole each case has all kinds of memory and decodes all
weights in all ways; else those that share a kernel with another leave it to that. The interpreter is chosen when Triton
is imported, hence a process.

Two of the interpreter's operations (triton 3.7.1) are not those of a GPU and are replaced here: casts between floats,
which truncate or round without carrying into the exponent, by PyTorch's, and fused multiply-add, which it rounds twice.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from quant.formats import codec as codecs
from quant.formats.codec import Codec, QuantTensor
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec

NAME = "model.layers.3.mlp.experts.{}.{}.weight"
SPECS = {
    "fp8": QuantSpec(format=QuantFormat.FP8),
    "fp8 in blocks of 3 x 40": QuantSpec(format=QuantFormat.FP8, block=(3, 40)),
    "fp8 along rows": QuantSpec(format=QuantFormat.FP8, block=(1, 128)),
    "fp8-ue8m0": QuantSpec(format=QuantFormat.FP8_UE8M0),
    "fp8-ue8m0 along rows": QuantSpec(format=QuantFormat.FP8_UE8M0, block=(1, 64)),
    "int4": QuantSpec(format=QuantFormat.INT4),
    "int4 in groups of 8": QuantSpec(format=QuantFormat.INT4, block=(1, 8)),
    "int4 in groups of 24, which have no kernel": QuantSpec(format=QuantFormat.INT4, block=(1, 24)),
    "mxfp8": QuantSpec(format=QuantFormat.MXFP8),
    "mxfp4": QuantSpec(format=QuantFormat.MXFP4),
    "nvfp4": QuantSpec(format=QuantFormat.NVFP4),
    "nvfp4 of modelopt": QuantSpec(format=QuantFormat.NVFP4, convention="modelopt"),
}
# whose kernel reads weights of other dtypes, strides and addresses in another case
BESIDE_ANOTHER = {
    "fp8 in blocks of 3 x 40",
    "fp8 along rows",
    "fp8-ue8m0 along rows",
    "int4 in groups of 8",
    "nvfp4 of modelopt",
}
FEW = 3  # weights that are decoded to each dtype
DIVISION = "division next to the middles of codes"
IN_GROUPS = (11, 384)  # of every group; more than one program


def kinds_of_weights(shape: tuple[int, int]) -> dict[str, Tensor]:
    """bf16 [n, k]: what weights look like, and what they hardly look like."""
    g = torch.Generator().manual_seed(shape[0])
    gaussian = (torch.randn(shape, generator=g) * 0.02).to(torch.bfloat16)
    bits = torch.randint(0, 1 << 16, shape, generator=g).to(torch.uint16)
    any_bits = torch.where((bits.int() & 0x7F80) == 0x7F80, 0x3F80, bits.int()).to(torch.uint16).view(torch.bfloat16)
    spread = (torch.randn(shape, generator=g) * torch.exp2(torch.randint(-9, 9, shape, generator=g))).to(torch.bfloat16)
    zeros = torch.zeros(shape, dtype=torch.bfloat16)
    zeros[1::3] *= -1
    zeros[-1, -1] = -0.5
    largest = torch.full(shape, torch.finfo(torch.bfloat16).max).to(torch.bfloat16)
    largest[::2] *= torch.linspace(-1, 1, shape[1]).to(torch.bfloat16)
    return {
        "gaussian": gaussian,
        "any bits": any_bits,
        "spread": spread,
        "zeros": zeros,
        "largest": largest,
        "subnormal": (gaussian.float() * 2.0**-124).to(torch.bfloat16),
        "tiny": (gaussian.float() * 2.0**-70).to(torch.bfloat16),
        "integers": torch.randint(-448, 449, shape, generator=g).to(torch.bfloat16),
    }


def bundles(codec: Codec, *, all_memory: bool = True) -> Iterator[dict[str, Tensor]]:
    """Weights that are encoded together, in one launch for each shape; the parts of their names say what they are.
    all_memory: also of fp32, with strides, and at odd addresses."""
    bn, bk = codec.block
    # ragged: no multiple of a block, nor of the 16 that Triton specializes kernels for
    made = kinds_of_weights((bn + bn // 2, bk + 11) if bn > 1 else (IN_GROUPS[0], IN_GROUPS[1] // bk * bk))
    yield {NAME.format(kind, "down_proj"): w for kind, w in made.items()}
    if not all_memory:
        return
    w = made["gaussian"]
    several = {NAME.format(i, p): w * (i + 1) for i, p in itertools.product(range(2), ("gate_proj", "up_proj"))}
    yield several | {
        NAME.format("fp32", "down_proj"): w.float() * 1.0001,
        NAME.format("strided", "down_proj"): torch.stack([w, w], 2)[:, :, 1],
        NAME.format("not_at_16_bytes", "down_proj"): torch.cat([w.flatten()[:1], w.flatten()])[1:].view(w.shape),
        NAME.format("of_another_shape", "down_proj"): made["spread"][: bn + 1, :bk],
    }


def different(codec: Codec, *, all_memory: bool = True, whole: bool = True) -> Iterator[str]:
    """What kernels compute otherwise than plain PyTorch does. whole: all encoded weights are decoded in all ways."""
    for i, bundle in enumerate(bundles(codec, all_memory=all_memory)):
        plain, by_kernel = both(codec, lambda b=bundle: codec.encode(b))  # type: ignore[misc]
        for name, q in plain.items():
            for leaf, part in q.stored.items():
                if not same(part, by_kernel[name].stored[leaf]):
                    yield f"{leaf} of {name}"
        if whole or i == 0:
            yield from stacks_different(codec, plain, whole=whole)
        plain, by_kernel = both(codec, lambda b=bundle: codec.fake(b))  # type: ignore[misc]
        yield from (f"fake {name}" for name in plain if not same(plain[name], by_kernel[name]))
    yield from codes_different(codec)
    yield from refusals_different(codec)


def stacks_different(codec: Codec, encoded: Mapping[str, QuantTensor], *, whole: bool = True) -> Iterator[str]:
    """Of weights of one shape, one by one or in one tensor for each leaf, as the embedded engine has them."""
    shape = next(iter(encoded.values())).shape
    alike = {name: q for name, q in encoded.items() if q.shape == shape}
    alike = alike if whole else dict(itertools.islice(alike.items(), FEW))
    stacked = {leaf: torch.stack([q.stored[leaf] for q in alike.values()]) for leaf in codec.stored}
    qs = list(alike.values())
    ways: dict[str, Callable[[], Tensor]] = {
        "bf16": lambda: codec.decode_stack(qs),
        "fp32": lambda: codec.decode_stack(qs, torch.float32),
        "bf16 in fp32": lambda: codec.decode_stored(stacked, torch.empty(len(qs), *shape)),
    }
    for way, decode in ways.items():
        plain, by_kernel = both(codec, decode)
        for name, one, other in zip(alike, plain, by_kernel, strict=True):
            if not same(one, other):
                yield f"{name} decoded to {way}"


def random_codes(codec: Codec) -> QuantTensor:
    """Random codes and scales, NaN codes among them, which `adopt` refuses and decoding has values for."""
    shape = (codec.block[0] * 3, codec.block[1] * 5)
    g, stored = torch.Generator().manual_seed(1), {}
    for leaf, (dtype, size) in codec.layout(shape).items():
        bits = torch.randint(0, 256, (*size, dtype.itemsize), generator=g).to(torch.uint8)
        stored[leaf] = torch.rand(size, generator=g) if leaf == codec.of_weight else bits.view(dtype).view(size)
    return QuantTensor(stored, shape)


def codes_different(codec: Codec) -> Iterator[str]:
    q = random_codes(codec)
    plain, by_kernel = both(codec, lambda: codec.decode(q, torch.float32))
    if not same_numbers(plain, by_kernel):
        yield "random codes"


def refusals_different(codec: Codec) -> Iterator[str]:
    """Of a weight with a NaN or an infinity beside a good one: both ways name it."""
    shape = (5, codec.block[1] * 2)
    for value, act in ((float("nan"), codec.encode), (-float("inf"), codec.fake)):
        good, bad = torch.ones(shape), torch.ones(shape)
        bad[3, -1] = value
        bundle = {NAME.format(i, "down_proj"): w for i, w in enumerate((good, bad))}
        answers = both(codec, lambda act=act, bundle=bundle: refusal(act, bundle))  # type: ignore[misc]
        if answers[0] != answers[1] or NAME.format(1, "down_proj") not in answers[0]:
            yield f"refusals {answers}"


def refusal(act: Callable[..., Any], bundle: dict[str, Tensor]) -> str:
    try:
        act(bundle)
    except ValueError as e:
        return str(e)
    return ""


def both(codec: Codec, act: Callable[[], Any]) -> tuple[Any, Any]:
    """The result of PyTorch and that of kernels."""
    found = []
    for kernels in (False, True):
        with patch.object(codecs, "uses_triton", lambda tensor, kernels=kernels: kernels):
            found.append(act())
    return found[0], found[1]


def same(a: Tensor, b: Tensor) -> bool:
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """As `same`, but PyTorch's own casts give NaN several bits."""
    return torch.equal(a.isnan(), b.isnan()) and same(a.nan_to_num(7.0), b.nan_to_num(7.0))


def fma(x: Any, y: Any, z: Any) -> Any:
    """x * y + z of fp32 arrays, rounded once. The product is exact in fp64; the sum is rounded to odd there, which
    keeps on which side of the middle between two fp32 numbers it lies (Boldo and Melquiond, 2008)."""
    product, z = x.astype(np.float64) * y, np.asarray(z, dtype=np.float64)
    total = np.asarray(product + z)
    virtual = total - product
    lost = (product - (total - virtual)) + (z - virtual)  # Knuth's two-sum: what rounding took from the sum
    even = np.isfinite(lost) & (lost != 0) & (total.view(np.int64) & 1 == 0)
    step = np.where((lost > 0) == (total > 0), 1, -1) * even
    return (total.view(np.int64) + step).view(np.float64).astype(np.float32)


def as_on_a_gpu() -> None:
    """Replaces the interpreter's casts and fused multiply-add."""
    import triton.language as tl
    from triton.runtime import interpreter

    kinds = {tl.float32: torch.float32, tl.bfloat16: torch.bfloat16, tl.float16: torch.float16}
    kinds[tl.float8e4nv] = torch.float8_e4m3fn

    def cast(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}
        given = torch.from_numpy(np.ascontiguousarray(data)).view(torch.uint8).view(kinds[source])
        done = given.to(kinds[target]).view(torch.uint8).numpy()
        return done.view(unsigned[target.primitive_bitwidth // 8]).reshape(data.shape)

    def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        return interpreter.TensorHandle(fma(x.data, y.data, z.data), x.dtype.scalar)

    interpreter._convert_float = cast
    interpreter.InterpreterBuilder.create_fma = fused


def main() -> None:
    from tests.support import triton_division

    as_on_a_gpu()
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    cases, whole = [word for word in sys.argv[1:] if word != "--whole"], "--whole" in sys.argv
    found = {
        case: list(different(make_codec(SPECS[case]), all_memory=whole or case not in BESIDE_ANOTHER, whole=whole))
        for case in cases or SPECS
    }
    if not cases:
        middles = triton_division.MIDDLES.items()
        found[DIVISION] = [f"{n} codes of {kind}" for kind, m in middles if (n := triton_division.different(m))]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

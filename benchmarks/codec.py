"""Codecs: GB/s of encode, fake quantization and decode in each format, all counted in bytes of the bf16 weight.

In one run, by turns, beside (a) `torch.Tensor.copy_` of the bf16 bytes, (b) the format's formula as one expression over
the whole tensor, packed, and (c) compressed-tensors' quantize and pack with given scales, where it is installed and
has the format. Each figure is a median over turns; each ratio is the median of ratios within a turn. On one thread the
processor's time counts, which other programs do not lengthen much; more threads, which need as many idle cores, are
compared with one by the clock. The results of (b) are checked to be the codec's. The weight is an expert of
DeepSeek-V3; `square_` is a smaller one, whose temporaries in (b) the allocator keeps from call to call. Bundles of
small experts and of a ragged shape show what a call costs.

    python benchmarks/codec.py [--quick]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from figures import add_write, finish
from torch import Tensor

from quant.formats.codec import Codec
from quant.formats.fp8_block import ceil_to_power_of_two
from quant.formats.minifloat import e8m0_decode
from quant.registry import CODECS, make_codec
from quant.spec import QuantFormat, QuantSpec

try:
    from compressed_tensors.compressors import pack_quantized
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
except ImportError:
    quantize = None

GOALS = {
    "fp8_encode_of_plain_min": 3.0,
    "int4_encode_of_plain_min": 3.0,
    "fp8_encode_of_compressed_tensors_min": 3.0,
    "int4_encode_of_compressed_tensors_min": 3.0,
    "fp8_encode_threads_min": 1.6,  # two threads over one, with two idle cores
    "int4_encode_threads_min": 1.6,
}
COLUMNS = {  # of the table in docs/benchmarks.md
    "encode_gb_per_s": "encode, GB/s",
    "fake_gb_per_s": "fake",
    "decode_gb_per_s": "decode",
    "copy_gb_per_s": "copy",
    "encode_of_plain": "encode / plain",
    "square_encode_of_plain": "the same, 2048 x 2048",
    "encode_of_compressed_tensors": "encode / compressed-tensors",
    "encode_threads": "encode, two threads / one",
}
CONVENTION = {QuantFormat.NVFP4: "modelopt"}  # the formula of `plain_nvfp4`
EXPERT = (2048, 7168)  # of DeepSeek-V3: 28 MiB of bf16
SQUARE = (2048, 2048)
Plain = Callable[[Tensor], tuple[Tensor, ...]]


def plain_fp8(w: Tensor, *, powers: bool = False) -> tuple[Tensor, ...]:
    n, k = w.shape
    x = w.float().view(n // 128, 128, k // 128, 128)
    s = x.abs().amax((1, 3), keepdim=True).clamp(min=1e-10) / 448
    s = ceil_to_power_of_two(s) if powers else s
    return (x / s).clamp(-448, 448).to(torch.float8_e4m3fn).view(n, k), s[:, 0, :, 0]


def plain_int4(w: Tensor) -> tuple[Tensor, ...]:
    n, k = w.shape
    x = w.float().view(n, k // 32, 32)
    s = (x.abs().amax(2, keepdim=True) / 7).clamp(min=1e-5).to(torch.bfloat16)
    q = (x / s.float()).round().clamp(-7, 7).to(torch.int32).view(n, k // 8, 8) + 8
    return (q << torch.arange(0, 32, 4, dtype=torch.int32)).sum(2, dtype=torch.int32), s[:, :, 0]


def plain_mxfp8(w: Tensor) -> tuple[Tensor, ...]:
    n, k = w.shape
    x = w.float().view(n, k // 32, 32)
    s = ceil_to_power_of_two((x.abs().amax(2, keepdim=True) / 448).clamp(min=2.0**-126))
    codes = (x / s).clamp(-448, 448).to(torch.float8_e4m3fn).view(n, k)
    return codes, (s.view(torch.int32) >> 23).to(torch.uint8)[:, :, 0]


def _e2m1_packed(x: Tensor) -> Tensor:
    t = x.abs()
    code = torch.where(t < 2, (t * 2).round(), torch.where(t < 4, t.round() + 2, (t / 2).round() + 4)).clamp(max=7)
    code = code.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)
    return code[:, ::2] | (code[:, 1::2] << 4)


def plain_mxfp4(w: Tensor) -> tuple[Tensor, ...]:
    n, k = w.shape
    x = w.float().view(n, k // 32, 32)
    codes = ((x.abs().amax(2, keepdim=True).view(torch.int32) >> 23) - 2).clamp(min=0).to(torch.uint8)
    return _e2m1_packed((x / e8m0_decode(codes)).view(n, k)), codes[:, :, 0]


def plain_nvfp4(w: Tensor) -> tuple[Tensor, ...]:
    n, k = w.shape
    x = w.float().view(n, k // 16, 16)
    whole = x.abs().max() / 2688
    s = (x.abs().amax(2, keepdim=True) / 6 / whole).clamp(max=448).to(torch.float8_e4m3fn)
    by = s.float() * whole
    return _e2m1_packed(torch.where(by > 0, x / by, 0.0).view(n, k)), s[:, :, 0], whole


PLAIN: dict[QuantFormat, Plain] = {
    QuantFormat.FP8: plain_fp8,
    QuantFormat.FP8_UE8M0: lambda w: plain_fp8(w, powers=True),
    QuantFormat.INT4: plain_int4,
    QuantFormat.MXFP8: plain_mxfp8,
    QuantFormat.MXFP4: plain_mxfp4,
    QuantFormat.NVFP4: plain_nvfp4,
}


def compressed(fmt: QuantFormat, w: Tensor, parts: list[Tensor]) -> Callable[[], object] | None:
    """compressed-tensors' quantize, and for INT4 its packing; scales are given to it, which spares it their search."""
    if quantize is None or fmt not in (QuantFormat.FP8, QuantFormat.INT4):
        return None
    how: dict[str, Any] = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}
    if fmt is QuantFormat.FP8:
        how = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
    args, scale = QuantizationArgs(symmetric=True, **how), parts[1].to(torch.bfloat16)
    zero = torch.zeros_like(scale)
    if fmt is QuantFormat.FP8:
        return lambda: quantize(w, scale, zero, args, dtype=torch.float8_e4m3fn)
    return lambda: pack_quantized.pack_to_int32(quantize(w, scale, zero, args, dtype=torch.int8), 4)


def bundles() -> dict[str, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)

    def some(count: int, n: int, k: int) -> dict[str, Tensor]:
        return {f"mlp.experts.{i}.down_proj.weight": torch.randn(n, k, generator=g).bfloat16() for i in range(count)}

    return {
        "": some(1, *EXPERT),
        "square_": some(1, *SQUARE),
        "small_": some(256, 64, 128),
        "ragged_": some(16, 200, 320),
    }


def ways(codec: Codec, bundle: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    encoded = list(codec.encode(bundle).values())
    values = {name: torch.empty_like(w) for name, w in bundle.items()}
    stack = torch.empty(len(bundle), *encoded[0].shape, dtype=torch.bfloat16)
    return {
        "encode": lambda: codec.encode(bundle),
        "fake": lambda: codec.fake(bundle, out=values),
        "decode": lambda: codec.decode_stack(encoded, out=stack),
    }


def _in_threads(count: int, call: Callable[[], object]) -> None:
    torch.set_num_threads(count)
    call()


def measure(fmt: QuantFormat, threads: int, turns: int) -> dict[str, float]:
    codec = make_codec(QuantSpec(format=fmt, convention=CONVENTION.get(fmt, "")))
    figures: dict[str, float] = {}
    torch.set_num_threads(1)
    for kind, bundle in bundles().items():
        work = ways(codec, bundle)
        nbytes = sum(w.nbytes for w in bundle.values())
        if len(bundle) == 1:
            work |= beside(codec, next(iter(bundle.values())))
        seconds = by_turns(work, turns, time.thread_time)
        for name, took in seconds.items():
            figures[f"{fmt}_{kind}{name}_gb_per_s"] = nbytes / statistics.median(took) / 1e9
        for name in ("copy", "plain", "compressed_tensors"):
            if name in seconds:
                figures[f"{fmt}_{kind}encode_of_{name}"] = _ratio(seconds[name], seconds["encode"])
    return figures | scaling(codec, threads, turns)


def scaling(codec: Codec, threads: int, turns: int) -> dict[str, float]:
    """How many times faster several threads are than one, on one weight, by turns and by the clock."""
    work: dict[str, Callable[[], object]] = {}
    for name, call in ways(codec, bundles()[""]).items():
        for count in (1, threads):
            work[f"{name}{count}"] = functools.partial(_in_threads, count, call)
    took = by_turns(work, turns, time.perf_counter)
    return {
        f"{codec.spec.format}_{name}_threads": _ratio(took[f"{name}1"], took[f"{name}{threads}"])
        for name in ("encode", "fake", "decode")
    }


def _ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def beside(codec: Codec, w: Tensor) -> dict[str, Callable[[], object]]:
    plain, copy = PLAIN[codec.spec.format], torch.empty_like(w)
    parts = list(codec.encode({"mlp.down_proj.weight": w})["mlp.down_proj.weight"].stored.values())
    for ours, theirs in zip(parts, plain(w), strict=False):
        ours, theirs = (x.contiguous().flatten().view(torch.uint8) for x in (ours, theirs))
        assert torch.equal(ours, theirs), codec.spec.format
    found: dict[str, Callable[[], object]] = {"copy": lambda: copy.copy_(w), "plain": lambda: plain(w)}
    if (other := compressed(codec.spec.format, w, parts)) is not None:
        found["compressed_tensors"] = other
    return found


def by_turns(work: dict[str, Callable[[], object]], turns: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(turns + 1):
        for name, call in work.items():
            began = clock()
            call()
            if turn:  # the first fetches memory
                seconds[name].append(clock() - began)
    return seconds


def matrix(figures: dict[str, float]) -> list[str]:
    """Markdown: a row for each format."""
    goal = {key.partition("_")[2].removesuffix("_min"): f">= {least:g} for FP8, INT4" for key, least in GOALS.items()}
    formats = dict.fromkeys(key.partition("_")[0] for key in figures)
    rows = [["format", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 1), ["goal", *(goal.get(c, "") for c in COLUMNS)]]
    rows += [[f, *(str(figures.get(f"{f}_{c}", "")) for c in COLUMNS)] for f in formats]
    return [f"| {' | '.join(row)} |" for row in rows]


def main() -> int:
    """0 when the goals hold."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(p)
    p.add_argument("--quick", action="store_true", help="5 turns instead of 25")
    p.add_argument("--threads", type=int, default=2, help="how many to compare with one")
    args = p.parse_args()
    figures: dict[str, float] = {}
    for fmt in CODECS:
        figures |= measure(fmt, args.threads, 5 if args.quick else 25)
    for name, value in figures.items():
        print(f"{name:48}{value:10.2f}")
    holds = all(figures[goal.removesuffix("_min")] >= least for goal, least in GOALS.items())
    rounded = {name: round(value, 3) for name, value in figures.items()}
    finish("codec", rounded, GOALS, holds, lines=matrix(rounded))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

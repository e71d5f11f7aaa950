"""Rates of one CUDA device that the plan assumes (`miles_like/timing/rates/calibration.py`): products, grouped products
of experts, attention, memory, copies over the host link, and the codecs.

Random operands, median of CUDA events after a warm-up; bytes count once read and once written. Each rate stands beside
the plan's. Codecs are PyTorch's, then Triton's, then Triton's kernels alone, with the bytes that these move beside a
copy's. Without CUDA it says so and measures nothing, unless `--tiny` asks for a look at the script itself.

    python benchmarks/gpu_rates.py [--only codecs] [--tiny] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from figures import add_write, finish
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from miles_like.device_table import DEVICES, Device
from miles_like.timing.rates.calibration import ATTENTION, HOST, MEMORY, PAGEABLE, PRODUCTS
from quant.formats.codec import Codec
from quant.kernels.choice import VARIABLE
from quant.kernels.traffic import table, traffics
from quant.registry import CODECS, make_codec
from quant.spec import QuantSpec

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
TOKENS = 16_384  # rows of the products of a micro-batch
# name -> (inputs, outputs) of linears: attention and gated MLP of three models, and a head
LINEARS = {
    "Qwen3-0.6B qkv": (1024, 4096),
    "Qwen3-0.6B up": (1024, 6144),
    "Qwen3-4B qkv": (2560, 6144),
    "Qwen3-4B up": (2560, 19_456),
    "Qwen3-30B qkv": (2048, 5120),
    "DeepSeek-V3 up": (7168, 36_864),
    "Qwen3-4B head": (2560, 151_936),
}
EXPERTS = 16
Function = Callable[..., Any]


def seconds(
    function: Callable[[], Any], *, least: int = 10, budget_s: float = 0.25, before: Callable[[], Any] | None = None
) -> float:
    """Median of at least `least` runs that take about `budget_s` in all. before: what the device does while a run is
    prepared on the host."""
    cuda = torch.cuda.is_available()
    for _ in range(3):
        function()
    _wait()
    began = time.perf_counter()
    function()
    _wait()
    runs = max(least, min(200, int(budget_s / max(time.perf_counter() - began, 1e-6))))
    if not cuda:
        return time.perf_counter() - began
    took = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if before is not None:
            before()
        start.record()
        function()
        end.record()
        took.append((start, end))
    _wait()
    return float(statistics.median(a.elapsed_time(b) for a, b in took)) / 1e3


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(slots=True)
class Rates:
    """Measures and prints; `scale` divides the sizes of operands."""

    where: str
    scale: int
    device: Device
    figures: dict[str, Any] = field(default_factory=dict)
    before: Callable[[], Any] | None = None  # as of `seconds`

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.where, dtype=torch.bfloat16)

    def flops(self, kind: str, what: str, flops: float, function: Function, *arguments: Any) -> None:
        self._add(kind, what, flops, "TFLOP/s", 1e12, partial(function, *arguments))

    def bytes(self, kind: str, what: str, nbytes: float, function: Function, *arguments: Any) -> None:
        self._add(kind, what, nbytes, "GB/s", 1e9, partial(function, *arguments))

    def _add(self, kind: str, what: str, amount: float, unit: str, per: float, function: Function) -> None:
        took = seconds(function, before=self.before)
        rate, plan = amount / took, assumed(kind, self.device)
        of_plan = f"{rate / plan:.2f} of the plan's" if plan else ""
        print(f"{what:44}{took * 1e3:10.3f} ms{rate / per:10.1f} {unit:8}{of_plan}", flush=True)
        self.figures[f"{what}, {unit}"] = round(rate / per, 1)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def products(rates: Rates) -> None:
    n = 8192 // rates.scale
    a, b = rates.randn(n, n), rates.randn(n, n)
    rates.flops("product", f"product {n}^3", 2 * n**3, matmul, a, b)
    if rates.where == "cuda":
        one = torch.ones((), device=rates.where)
        x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()
        scaled = partial(torch._scaled_mm, out_dtype=torch.bfloat16)
        rates.flops("fp8", f"FP8 product {n}^3", 2 * n**3, scaled, x, y, one, one)
    for name, (inputs, outputs) in LINEARS.items():
        x, w = rates.randn(TOKENS // rates.scale, inputs), rates.randn(outputs // rates.scale, inputs)
        g = rates.randn(TOKENS // rates.scale, outputs // rates.scale)
        flops = 2 * x.numel() * w.shape[0]
        rates.flops("product", name, flops, matmul, x, w.t())
        rates.flops("product", f"{name}, input's gradient", flops, matmul, g, w)
        rates.flops("product", f"{name}, weight's gradient", flops, matmul, g.t(), x)


def grouped(rates: Rates) -> None:
    """Experts of Qwen3-30B-A3B: 8 x TOKENS rows over 128 experts of 2048 x 768, gate and up in one product. Loads
    differ as a random router's."""
    if rates.where != "cuda":
        return
    experts, hidden, ffn, rows = 128, 2048, 768, 8 * TOKENS // rates.scale
    counts = torch.multinomial(torch.ones(experts), rows, replacement=True).bincount(minlength=experts)
    product = partial(torch._grouped_mm, offs=counts.cumsum(0).to(torch.int32).to(rates.where))
    x, w, g = rates.randn(rows, hidden), rates.randn(experts, hidden, 2 * ffn), rates.randn(rows, 2 * ffn)
    flops, name = 2 * rows * hidden * 2 * ffn, "experts of Qwen3-30B"
    rates.flops("product", name, flops, product, x, w)
    rates.flops("product", f"{name}, input's gradient", flops, product, g, w.transpose(1, 2))
    rates.flops("product", f"{name}, weight's gradient", flops, product, x.t(), g)


def attend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention(rates: Rates) -> None:
    """Causal, 32 heads of 128 channels, one sample."""
    for name, backend in BACKENDS.items() if rates.where == "cuda" else {"math": SDPBackend.MATH}.items():
        for length in (8192 // rates.scale, 16_384 // rates.scale, 65_536 // rates.scale):
            q, k, v = (rates.randn(1, 32, length, 128).requires_grad_() for _ in range(3))
            flops = 4 * 32 * 128 * length * (length + 1) / 2
            try:
                out = attend(backend, q, k, v)
            except RuntimeError as e:
                print(f"attention, {name}: {str(e).splitlines()[0]}")
                break
            what = f"attention {length}, {name}"
            rates.flops("attention", what, flops, attend, backend, q.detach(), k.detach(), v.detach())
            backward = partial(torch.autograd.grad, retain_graph=True)
            rates.flops("attention", f"{what}, backward", 2.5 * flops, backward, out, (q, k, v), torch.randn_like(out))


def moved(rates: Rates) -> None:
    n = 2**31 // rates.scale
    a, b = (torch.empty(n, dtype=torch.uint8, device=rates.where) for _ in range(2))
    rates.bytes("memory", "copy on the device", 2 * n, b.copy_, a)
    x, y, z = (torch.randn(n // 8, device=rates.where) for _ in range(3))
    rates.bytes("memory", "triad", 12 * (n // 8), partial(torch.add, alpha=2, out=z), x, y)
    rows, gain = rates.randn(TOKENS // rates.scale, 2048), rates.randn(2048)
    rates.bytes("memory", "RMS norm of 16,384 x 2,048", 4 * rows.numel(), F.rms_norm, rows, (2048,), gain)
    part = a[: n // 4]
    for kind in ("host", "pageable") if rates.where == "cuda" else ():
        other = torch.empty(n // 4, dtype=torch.uint8, pin_memory=kind == "host").fill_(1)
        rates.bytes(kind, f"{kind} to device", n // 4, part.copy_, other)
        rates.bytes(kind, f"device to {kind}", n // 4, other.copy_, part)


def codecs(rates: Rates) -> None:
    """Down projections of 16 experts of DeepSeek-V3, 470 MB of bf16, which no cache holds. Bytes are those of bf16."""
    names = [f"model.layers.3.mlp.experts.{i}.down_proj.weight" for i in range(EXPERTS)]
    bundle = {name: rates.randn(7168 // rates.scale, 2048) * 0.02 for name in names}
    copied = torch.empty(2, EXPERTS * 7168 // rates.scale, 2048, device=rates.where, dtype=torch.bfloat16)
    rates.bytes("memory", "copy of these weights, read and written", copied.nbytes, copied[1].copy_, copied[0])
    copy = rates.figures["copy of these weights, read and written, GB/s"]
    for fmt in CODECS:
        codec = make_codec(QuantSpec(format=fmt))
        if rates.where == "cuda":
            with plain():
                whole_codec(rates, f"{fmt}, PyTorch", codec, bundle)
            whole_codec(rates, f"{fmt}, Triton", codec, bundle)
            kernels(rates, codec, bundle, copy)
        else:
            whole_codec(rates, f"{fmt}, PyTorch", codec, bundle)
    print("\n".join(["", *table(7168 * 2048, {d: DEVICES[d].hbm for d in ("H100", "H200", "B200")})]))


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Codecs by PyTorch."""
    os.environ[VARIABLE] = "0"
    yield
    del os.environ[VARIABLE]


def whole_codec(rates: Rates, what: str, codec: Codec, bundle: dict[str, Tensor]) -> None:
    size, encoded = sum(w.nbytes for w in bundle.values()), list(codec.encode(bundle).values())
    rates.bytes("codec", f"{what}, encode", size, codec.encode, bundle)
    rates.bytes("codec", f"{what}, fake", size, codec.fake, bundle)
    rates.bytes("codec", f"{what}, decode", size, codec.decode_stack, encoded)


def kernels(rates: Rates, codec: Codec, bundle: dict[str, Tensor], copy: float) -> None:
    """What kernels take without the host's time: copies keep the device busy while it prepares their launches."""
    from quant.kernels import launch

    found, weights = codec.encode(bundle), list(bundle.values())
    made = launch.Kernels(codec.spec.format.value, codec.block, codec.divides)
    codes, scales = list(codec.stored)[:2]
    stored = [(q.stored[codes], q.stored[scales]) for q in found.values()]
    out = torch.empty(len(weights), *weights[0].shape, device=rates.where, dtype=torch.bfloat16).unbind()
    top = None
    if codec.of_weight:
        top = torch.stack([q.stored[codec.of_weight] for q in found.values()]).flatten()
    tops = None if top is None else top.cpu()

    def encode() -> None:
        if tops is not None:
            launch.amax(weights)
        made.encode(weights, stored, tops)

    def fake() -> None:
        if tops is not None:
            launch.amax(weights)
        made.fake(weights, out, tops)

    def busy() -> None:
        for _ in range(4):
            spare[1].copy_(spare[0])

    spare = torch.empty(2, len(weights) * weights[0].numel(), device=rates.where, dtype=torch.bfloat16)
    rates.before = busy
    runs: dict[str, Callable[[], object]] = {"encode": encode, "fake": fake}
    runs["decode"] = partial(made.decode, [c for c, _ in stored], [s for _, s in stored], out, top, rounded=True)
    for t in traffics():
        if t.format is codec.spec.format:
            what = f"{t.format}, kernel alone, {t.work}, moved"
            rates.bytes("codec", what, t.moved * sum(w.numel() for w in weights), runs[t.work])
            print(f"{'':44}{rates.figures[f'{what}, GB/s'] / copy:.2f} of the copy")
    rates.before = None


def assumed(kind: str, device: Device) -> float | None:
    """The rate that the plan has for this kind of work: FLOP/s or bytes/s."""
    products_of = PRODUCTS[device.name]
    return {
        "product": products_of * device.bf16,
        "fp8": products_of * (device.fp8 or 0.0),
        "attention": ATTENTION * products_of * device.bf16,
        "memory": MEMORY * device.hbm,
        "host": HOST * device.host,
        "pageable": PAGEABLE,
    }.get(kind)


PARTS = (products, grouped, attention, moved, codecs)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", choices=[part.__name__ for part in PARTS], help="one part of it")
    p.add_argument("--tiny", action="store_true", help="small operands, on any device")
    add_write(p)
    args = p.parse_args()
    if not torch.cuda.is_available() and not args.tiny:
        print("no CUDA device here: nothing was measured")
        return 0
    where = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if where == "cuda" else "cpu"
    known = [d for d in DEVICES.values() if d.name in name.replace(" ", "")]
    device = max(known, key=lambda d: len(d.name), default=DEVICES["H100"])
    torch.manual_seed(0)
    rates = Rates(where, 64 if args.tiny else 1, device, {"device": name, "torch": torch.__version__})
    for part in PARTS:
        if args.only in (None, part.__name__):
            part(rates)
    finish("gpu_rates", rates.figures, {}, True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

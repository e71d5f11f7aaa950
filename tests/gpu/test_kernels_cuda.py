"""The trainer's kernels on a CUDA device against plain PyTorch in fp64 or fp32: log-probabilities, norms, SwiGLU, order
of routed rows, grouped products, attention over packs. Prints the seconds of each and of the plain way.

Not covered: several ranks, the trainer's step as a whole (test_trainer_cuda.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_bridge.device.device import init_device

pytestmark = [pytest.mark.gpu, pytest.mark.slow]  # a compiler is a process
BF16 = torch.bfloat16


class Alone:
    """A process group of one rank."""

    @staticmethod
    def size() -> int:
        return 1

    @staticmethod
    def rank() -> int:
        return 0


@pytest.fixture(autouse=True)
def megatron() -> None:
    init_device()


def _seconds(work: Callable[[], Any], rounds: int = 5) -> float:
    """Of one call, the device's time, after two calls."""
    for _ in range(2):
        work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(rounds):
        work()
    end.record()
    torch.cuda.synchronize()
    took: float = begin.elapsed_time(end)
    return took / 1e3 / rounds


def _report(what: str, fused: float, plain: float, moved: float = 0.0) -> None:
    rate = f", {moved / fused / 1e9:,.0f} GB/s" if moved else ""
    print(f"\n{what}: {1e3 * fused:.3f} ms{rate}; plain {1e3 * plain:.3f} ms")


def _applied(function: Any, *inputs: Tensor, eps: float) -> Tensor:
    out: Tensor = function.apply(*inputs, eps)
    return out


def _experts(function: Any, sizes: list[int], x: Tensor, *weights: Tensor) -> Tensor:
    out: Tensor = function.apply(x, sizes, *weights)
    return out


def _close(found: Tensor, want: Tensor, bound: float) -> None:
    """Within `bound` of the largest value."""
    assert found.shape == want.shape
    worst = float((found.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-30))
    assert worst <= bound, worst


def _gradients(function: Callable[..., Any], inputs: list[Tensor], slopes: list[Tensor]) -> list[Tensor]:
    """The outputs of `function` and its gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outs = function(*inputs)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    grads = torch.autograd.grad(sum((o * s).sum() for o, s in zip(outs, slopes, strict=True)), inputs)
    return [*(o.detach() for o in outs), *grads]


# ---- log-probabilities


def _scored(hidden: Tensor, weight: Tensor, labels: Tensor, memory: int) -> tuple[Tensor, Tensor]:
    from megatron_bridge.model.logprobs import label_logprobs

    return label_logprobs(hidden, weight, labels, temperature=0.7, memory=memory, group=Alone())  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (BF16, 2e-2)])
@pytest.mark.parametrize(("rows", "hidden", "vocab", "count"), [(37, 64, 1003, 1), (515, 128, 5000, 3)])
def test_logprobs_and_entropy(
    dtype: torch.dtype, bound: float, rows: int, hidden: int, vocab: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against fp64 on the same numbers, in several blocks, and against the plain way."""
    torch.manual_seed(0)
    h = torch.randn(rows, hidden, device="cuda", dtype=dtype)
    w = (torch.randn(vocab, hidden, device="cuda") / 8).to(dtype)
    labels = torch.randint(0, vocab, (rows, count), device="cuda")
    slopes = [torch.randn(rows, count, device="cuda"), torch.randn(rows, device="cuda")]
    memory = rows * 256 * 8

    def oracle(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(h @ w.t() / 0.7, -1)
        return log_p.gather(1, labels), -(log_p.exp() * log_p).sum(-1)

    want = _gradients(oracle, [h.double(), w.double()], slopes)
    for way in ("1", "0"):
        monkeypatch.setenv("MILES_LIKE_TRITON", way)
        found = _gradients(lambda h, w: _scored(h, w, labels, memory), [h, w], slopes)
        for a, b in zip(found, want, strict=True):
            _close(a, b, bound)


def test_a_logit_that_is_not_a_number_reaches_the_result() -> None:
    h, w = torch.randn(9, 64, device="cuda", dtype=BF16), torch.randn(300, 64, device="cuda", dtype=BF16)
    h[3] = torch.nan
    logprobs, entropy = _scored(h, w, torch.zeros(9, 1, dtype=torch.int64, device="cuda"), 1 << 20)
    bad = torch.arange(9, device="cuda") == 3
    assert torch.equal(logprobs[:, 0].isnan(), bad) and torch.equal(entropy.isnan(), bad)


def test_time_of_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,384 rows of Qwen3-0.6B's head: 4.6 GiB of logits in BF16, read in forward, read and written in backward."""
    h = torch.randn(16384, 1024, device="cuda", dtype=BF16, requires_grad=True)
    w = (torch.randn(151936, 1024, device="cuda") / 32).to(BF16).requires_grad_()
    labels = torch.randint(0, 151936, (16384, 1), device="cuda")

    def step() -> None:
        logprobs, _ = _scored(h, w, labels, 64 << 20)
        torch.autograd.grad(logprobs.sum(), [h, w])

    seconds = {}
    for way in ("1", "0"):
        monkeypatch.setenv("MILES_LIKE_TRITON", way)
        seconds[way] = _seconds(step, 2)
    _report("log-probabilities, forward and backward", seconds["1"], seconds["0"])


# ---- rows


@pytest.mark.parametrize(("rows", "width"), [(5, 37), (1000, 128), (301, 2048), (77, 7168)])
def test_norm(rows: int, width: int) -> None:
    from megatron_bridge.model.kernels.rms_norm import FusedRMSNorm

    x, g = (torch.randn(rows, 3, width, device="cuda", dtype=BF16) for _ in range(2))
    w = 1 + torch.randn(width, device="cuda", dtype=BF16) / 8
    want = _gradients(lambda x, w: F.rms_norm(x, (width,), w, 1e-6), [x.double(), w.double()], [g])
    found = _gradients(partial(_applied, FusedRMSNorm, eps=1e-6), [x, w], [g])
    for a, b in zip(found, want, strict=True):
        _close(a, b, 1e-2)


@pytest.mark.parametrize(("rows", "width"), [(5, 37), (1000, 768), (33, 1500)])
def test_swiglu(rows: int, width: int) -> None:
    from megatron_bridge.model.kernels.swiglu import WeightedSwiGLU

    h, g = torch.randn(rows, 2 * width, device="cuda", dtype=BF16), torch.randn(rows, width, device="cuda", dtype=BF16)
    w = torch.rand(rows, 1, device="cuda")
    want = _gradients(lambda h, w: F.silu(h[:, :width]) * h[:, width:] * w, [h.double(), w.double()], [g])
    found = _gradients(WeightedSwiGLU.apply, [h, w], [g])
    for a, b in zip(found, want, strict=True):
        _close(a, b, 1e-2)


@pytest.mark.parametrize(("tokens", "experts", "top_k", "width"), [(7, 4, 2, 40), (1000, 32, 8, 2048)])
def test_order_of_routed_rows(tokens: int, experts: int, top_k: int, width: int) -> None:
    """Rows and weights are megatron's in the same order; the sum back and both gradients are within BF16's rounding of
    those in fp32."""
    from megatron.core.transformer.moe import token_dispatcher

    import megatron_bridge.model.permutation as ours

    ours.sort_on_devices()
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k, -1).indices
    routed = torch.zeros(tokens, experts, device="cuda").scatter(1, ids, 1.0).bool()
    probs = torch.rand(tokens, experts, device="cuda") * routed
    x, g = (torch.randn(n, width, device="cuda", dtype=BF16) for n in (tokens, tokens * top_k))

    def there(function: Any, x: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights, order = function(x, routed, probs=probs, num_out_tokens=tokens * top_k)
        kept.append(order)
        return rows, weights

    kept: list[Any] = []
    slopes = [g, torch.randn(tokens * top_k, device="cuda")]
    found = _gradients(partial(there, token_dispatcher.permute), [x, probs], slopes)
    stock = token_dispatcher.permute.of_megatron
    want = _gradients(partial(there, stock), [x.float(), probs], slopes)
    assert isinstance(kept[0], ours.RowOrder)
    assert torch.equal(found[0].float(), want[0]) and torch.equal(found[1], want[1])
    _close(found[2], want[2], 1e-2)
    assert torch.equal(found[3], want[3])
    shape, back = x.shape, torch.randn_like(x)
    got = _gradients(lambda y: token_dispatcher.unpermute(y, kept[0], restore_shape=shape), [g], [back])
    wanted = _gradients(lambda y: token_dispatcher.unpermute(y, kept[1], restore_shape=shape), [g.float()], [back])
    for a, b in zip(got, wanted, strict=True):
        _close(a, b, 1e-2)


def test_time_of_rows() -> None:
    """The benchmark's shapes: 32,768 tokens of 2,048, 8 of 32 experts of 768."""
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    from megatron_bridge.model.kernels.gathered_rows import summed_rows
    from megatron_bridge.model.kernels.rms_norm import FusedRMSNorm
    from megatron_bridge.model.kernels.swiglu import WeightedSwiGLU
    from megatron_bridge.model.local_modules import _RMSNorm
    from megatron_bridge.model.permutation import row_order

    def both(function: Any, *inputs: Any) -> Callable[[], None]:
        leaves = [x for x in inputs if isinstance(x, Tensor) and x.is_floating_point()]

        def work() -> None:
            out = function(*inputs)
            torch.autograd.grad(out, leaves, out.detach())

        return work

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=BF16, requires_grad=True)

    for shape in ((32768, 2048), (32768 * 32, 128)):
        x, w = random(*shape), random(shape[1])
        fused, plain = (_seconds(both(f.apply, x, w, 1e-6)) for f in (FusedRMSNorm, _RMSNorm))
        _report(f"RMSNorm {shape}, forward and backward", fused, plain, 5 * x.numel() * 2)
    h, p = random(32768 * 8, 2 * 768), torch.rand(32768 * 8, 1, device="cuda", requires_grad=True)
    fused = _seconds(both(WeightedSwiGLU.apply, h, p))
    plain = _seconds(both(lambda h, p: weighted_bias_swiglu_impl(h, None, p), h, p))
    _report("SwiGLU, forward and backward (plain: torch.compile)", fused, plain, 4 * h.numel() * 2)
    rows = torch.randn(32768 * 8, 2048, device="cuda", dtype=BF16)
    routed = torch.zeros(32768, 32, device="cuda").scatter(
        1, torch.rand(32768, 32, device="cuda").topk(8, -1).indices, 1.0
    )
    order, _ = row_order(routed.bool(), len(rows))
    blank = torch.zeros(32768, 2048, device="cuda", dtype=BF16)
    fused = _seconds(lambda: summed_rows(rows, order.places, order.ends))
    plain = _seconds(lambda: blank.index_add_(0, order.sources, rows))
    _report("sum of routed rows (plain: index_add_)", fused, plain, 9 * blank.numel() * 2)
    spread = _seconds(lambda: blank.index_select(0, order.sources))
    made = _seconds(lambda: row_order(routed.bool(), len(rows)))
    print(f"rows spread by index_select {1e3 * spread:.3f} ms, their order made {1e3 * made:.3f} ms")


# ---- experts and attention


@pytest.mark.parametrize("sizes", [[3, 0, 17, 1, 64, 2, 0, 5], [0, 0, 40], [1]])
def test_grouped_products(sizes: list[int]) -> None:
    """Experts without tokens get gradients of zero."""
    from megatron_bridge.model.grouped_experts import GroupedLinear
    from megatron_bridge.model.kernels.grouped_product import GroupedProduct, supports

    x = torch.randn(sum(sizes), 64, device="cuda", dtype=BF16)
    weights = [torch.randn(48, 64, device="cuda", dtype=BF16) for _ in sizes]
    g = torch.randn(sum(sizes), 48, device="cuda", dtype=BF16)
    torch.empty(1 << 24, device="cuda").fill_(torch.nan)  # what freed memory may hold
    assert supports(x, weights)
    found = _gradients(partial(_experts, GroupedProduct, sizes), [x, *weights], [g])
    wide = [w.double() for w in weights]
    want = _gradients(partial(_experts, GroupedLinear, sizes), [x.double(), *wide], [g.double()])
    for a, b in zip(found, want, strict=True):
        _close(a, b, 1e-2)


def test_time_of_experts() -> None:
    from megatron_bridge.model.grouped_experts import GroupedLinear
    from megatron_bridge.model.kernels.grouped_product import GroupedProduct

    for experts, inner in ((32, 768), (128, 768)):
        sizes = [32768 * 8 // experts] * experts
        x = torch.randn(sum(sizes), 2048, device="cuda", dtype=BF16, requires_grad=True)
        weights = [torch.randn(2 * inner, 2048, device="cuda", dtype=BF16, requires_grad=True) for _ in sizes]

        def step(function: Any, x: Tensor = x, sizes: list[int] = sizes, weights: list[Tensor] = weights) -> None:
            out = _experts(function, sizes, x, *weights)
            torch.autograd.grad(out, [x, *weights], out.detach())

        fused, plain = (_seconds(partial(step, f), 3) for f in (GroupedProduct, GroupedLinear))
        flops = 6 * x.numel() * 2 * inner
        _report(f"{experts} experts, forward and backward, {flops / fused / 1e12:.0f} TFLOP/s", fused, plain)


HEADS = {"8 of 2": (8, 2, 128, 128), "alone": (4, 4, 64, 64), "latent": (4, 4, 192, 128)}


@pytest.mark.parametrize("heads", HEADS)
def test_attention_over_a_pack(heads: str) -> None:
    """Segments of 1 to 300 tokens, fewer heads of keys, values narrower than keys, against fp32 on the CPU's path."""
    from megatron_bridge.model.kernels.varlen_attention import supports, varlen_attention
    from megatron_bridge.model.local_modules import packed_causal_attention

    h, g, d, v = HEADS[heads]
    lengths = [1, 7, 300, 64, 129, 2]
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    total = sum(lengths)
    q, k, values, slope = (torch.randn(total, n, size, dtype=BF16) for n, size in ((h, d), (g, d), (g, v), (h, v)))
    scale = d**-0.5

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(h // g, 1), v.repeat_interleave(h // g, 1)
        return packed_causal_attention(q, k, v, ends, scale)

    want = _gradients(plain, [q.float(), k.float(), values.float()], [slope.float()])
    there = [x.cuda() for x in (q, k, values)]
    assert supports(there[0], there[2])
    found = _gradients(lambda q, k, v: varlen_attention(q, k, v, ends.cuda(), 300, scale), there, [slope.cuda()])
    for a, b in zip(found, want, strict=True):
        _close(a.cpu(), b, 2e-2)


def test_time_of_attention() -> None:
    """16 samples of 2,048 tokens, 32 heads of queries and 4 of keys; beside it cuDNN's kernel over a batch of equal
    lengths, with keys and values repeated."""
    from megatron_bridge.model.kernels.varlen_attention import varlen_attention

    n, length = 16, 2048
    ends = torch.arange(0, n * length + 1, length, dtype=torch.int32, device="cuda")
    q, k, v = (
        torch.randn(n * length, heads, 128, device="cuda", dtype=BF16, requires_grad=True) for heads in (32, 4, 4)
    )

    def step() -> None:
        out = varlen_attention(q, k, v, ends, length, 128**-0.5)
        torch.autograd.grad(out, [q, k, v], out.detach())

    def batched() -> None:
        query, key, value = (x.view(n, length, -1, 128).transpose(1, 2) for x in (q, k, v))
        key, value = key.repeat_interleave(8, 1), value.repeat_interleave(8, 1)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, [q, k, v], out.detach())

    fused, cudnn = _seconds(step), _seconds(batched)
    flops = 3.5 * 2 * 2 * n * length * length / 2 * 32 * 128
    _report(f"attention, forward and backward, {flops / fused / 1e12:.0f} TFLOP/s (plain: cuDNN)", fused, cudnn)

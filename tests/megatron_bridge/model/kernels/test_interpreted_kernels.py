"""The trainer's Triton kernels, interpreted on a CPU, against plain PyTorch: odd sizes, strides, values that are no
numbers, and a trainer's step as a whole. In fp32. Not covered: BF16's rounding, and the device (tests/gpu)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.interpreted import as_on_a_device, interpreter

pytestmark = pytest.mark.slow
Pairs = list[tuple[Tensor, Tensor]]  # of a kernel, of plain PyTorch


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    with interpreter() as run:
        yield run


def _compare(pairs: Pairs, bound: float = 2e-5) -> None:
    assert pairs
    for found, want in pairs:
        torch.testing.assert_close(found, want, atol=bound, rtol=bound, equal_nan=True)


def _both(kernel: Any, plain: Any, *inputs: Tensor) -> Pairs:
    """Outputs and gradients of all inputs that have some."""
    sides = []
    for function in (kernel, plain):
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        outs = function(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        slopes = [torch.linspace(-1, 1, max(o.numel(), 1))[: o.numel()].view(o.shape) for o in outs]
        total = sum((o * s).sum() for o, s in zip(outs, slopes, strict=True))
        grads = torch.autograd.grad(total, [x for x in leaves if x.requires_grad])
        sides.append([*(o.detach() for o in outs), *grads])
    return list(zip(*sides, strict=True))


def _applied(function: Any, *arguments: Any) -> Tensor:
    out: Tensor = function.apply(*arguments)
    return out


# ---- log-probabilities


class _Alone:
    @staticmethod
    def size() -> int:
        return 1

    @staticmethod
    def rank() -> int:
        return 0


def _logprobs(rows: int, vocab: int, count: int, columns: int, uses: str, bad: bool) -> Pairs:
    from megatron_bridge.model.logprobs import label_logprobs

    torch.manual_seed(rows)
    hidden, weight = torch.randn(2 * rows, 8)[::2], torch.randn(vocab, 8)
    if bad:
        hidden = hidden.clone()
        hidden[1], hidden[2, 0] = torch.nan, torch.inf
    if rows > 3:
        hidden[3] *= 30  # one sure row
    labels = torch.randint(0, vocab, (count, rows)).t()

    def computed(fused: bool) -> Callable[[Tensor, Tensor], Any]:
        def function(hidden: Tensor, weight: Tensor) -> Any:
            memory = columns * max(rows, 1) * (4 if fused else 8)
            how: dict[str, Any] = {"temperature": 0.7, "memory": memory, "group": _Alone}
            logprobs, entropy = label_logprobs(hidden, weight, labels, **how)
            return {"both": (logprobs, entropy), "entropy": entropy, "logprobs": logprobs}[uses]

        return function

    def kernel(hidden: Tensor, weight: Tensor) -> Any:
        with as_on_a_device():
            return computed(True)(hidden, weight)

    return _both(kernel, computed(False), hidden, weight)


@pytest.mark.parametrize("uses", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize(
    ("rows", "vocab", "count", "columns"), [(5, 70, 1, 70), (5, 70, 3, 17), (1, 3, 2, 1), (0, 9, 1, 4), (7, 130, 1, 64)]
)
def test_logprobs(interpreted: Callable[..., Any], rows: int, vocab: int, count: int, columns: int, uses: str) -> None:
    _compare(interpreted(_logprobs, rows, vocab, count, columns, uses, False), 1e-4)


def test_values_that_are_no_numbers_stay_in_their_rows(interpreted: Callable[..., Any]) -> None:
    """As with plain PyTorch; the weight's gradient sums over the rows."""
    pairs = interpreted(_logprobs, 6, 40, 1, 17, "both", True)
    _compare(pairs, 1e-4)
    logprobs, hidden = pairs[0][0], pairs[2][0]
    assert logprobs.isnan().any(1).tolist() == [False, True, True, False, False, False]
    assert hidden.isnan().any(1).tolist() == [False, True, True, False, False, False]


def _outside() -> Pairs:
    from megatron_bridge.model.kernels.logits import add_block, slope_in_place

    logits, top, sums = torch.randn(3, 10), torch.full((3,), -torch.inf), torch.zeros(4, 3)
    labels = torch.tensor([[-1, 20], [29, 30], [19, 25]])
    add_block(logits, labels, 20, 1.0, top, sums)
    want = torch.tensor([[0.0, logits[0, 0]], [logits[1, 9], 0.0], [0.0, logits[2, 5]]])
    lse, none = logits.logsumexp(1), torch.zeros(3)
    p, grad = logits.softmax(1), torch.ones(3, 2)
    slope = slope_in_place(logits.clone(), labels, 20, 1.0, lse, none, grad, None)
    hot = torch.zeros(3, 10).index_put_((torch.arange(3), torch.tensor([0, 9, 5])), torch.ones(3))
    return [(sums[2:].t(), want), (top + sums[0].log(), lse), (slope, hot - 2 * p)]


def test_a_label_of_another_block_is_not_read(interpreted: Callable[..., Any]) -> None:
    _compare(interpreted(_outside))


# ---- rows


def _norm(width: int, strided: bool) -> Pairs:
    from megatron_bridge.model.kernels.rms_norm import FusedRMSNorm

    x = torch.randn(9, 5, 2 * width)[..., :width] if strided else torch.randn(9, 5, width)
    return _both(
        lambda x, w: _applied(FusedRMSNorm, x, w, 1e-6),
        lambda x, w: F.rms_norm(x, (width,), w, 1e-6),
        x,
        torch.randn(width),
    )


@pytest.mark.parametrize(("width", "strided"), [(1, False), (37, False), (128, True), (1100, False)])
def test_norm(interpreted: Callable[..., Any], width: int, strided: bool) -> None:
    _compare(interpreted(_norm, width, strided), 1e-4)


def _swiglu(rows: int, width: int) -> Pairs:
    from megatron_bridge.model.kernels.swiglu import WeightedSwiGLU

    h = 3 * torch.randn(rows, 2 * width)
    return _both(WeightedSwiGLU.apply, lambda h, w: F.silu(h[:, :width]) * h[:, width:] * w, h, torch.rand(rows, 1))


@pytest.mark.parametrize(("rows", "width"), [(0, 8), (5, 1), (3, 37), (2, 1100), (13, 192)])
def test_swiglu(interpreted: Callable[..., Any], rows: int, width: int) -> None:
    _compare(interpreted(_swiglu, rows, width))


def _rope(heads: int, size: int, rotated: int) -> Pairs:
    from megatron_bridge.model.kernels.rope import FusedRope
    from megatron_bridge.model.packed_rope import _Rotated

    x = torch.randn(6, heads, 2 * size)[..., size:]
    angles = torch.randn(6, rotated)
    cos, sin = angles.cos(), angles.sin()
    wide = (x[:, None].expand(6, heads, rotated) for x in (cos, sin))
    cos3, sin3 = wide
    return _both(lambda x: _applied(FusedRope, x, cos, sin), lambda x: _applied(_Rotated, x, cos3, sin3, False), x)


@pytest.mark.parametrize(("heads", "size", "rotated"), [(1, 2, 2), (3, 12, 8), (4, 16, 16)])
def test_rope(interpreted: Callable[..., Any], heads: int, size: int, rotated: int) -> None:
    """Angles whose halves differ, and dimensions that are not rotated."""
    _compare(interpreted(_rope, heads, size, rotated))


def _rows(tokens: int, width: int) -> Pairs:
    from megatron_bridge.model.kernels.gathered_rows import Gathered, Spread
    from megatron_bridge.model.permutation import row_order

    routed = torch.rand(tokens, 6) < torch.rand(tokens, 1)
    order, _ = row_order(routed, int(routed.sum()))
    spread = _both(lambda x: _applied(Spread, x, *order), lambda x: x[order.sources], torch.randn(tokens, width))

    def summed(rows: Tensor) -> Tensor:
        return torch.zeros(tokens, width).index_add(0, order.sources, rows)

    return spread + _both(lambda x: _applied(Gathered, x, *order), summed, torch.randn(len(order.sources), width))


@pytest.mark.parametrize(("tokens", "width"), [(1, 3), (11, 40)])
def test_rows_spread_and_summed(interpreted: Callable[..., Any], tokens: int, width: int) -> None:
    """Tokens with any number of rows, none included."""
    _compare(interpreted(_rows, tokens, width))


# ---- a step


def _step(where: Path) -> list[dict[str, float]]:
    """Metrics of a step computed by kernels, and of the same one by plain PyTorch."""
    from tests.support import toy
    from tests.support.spawn import free_port

    out = []
    for fused in (True, False):
        config = toy.config(toy.hf_dir(where))
        with toy.trainer(config, 0, 1, free_port()) as trainer:
            toy.scramble(trainer)
            [row], tokens = toy.grid(toy.samples(3), dp=1, micros=1)
            if fused:
                with as_on_a_device():
                    out.append(dict(trainer.step(row, tokens, 1).metrics))
            else:
                out.append(dict(trainer.step(row, tokens, 1).metrics))
    return out


def test_a_step_is_the_plain_one(interpreted: Callable[..., Any], tmp_path: Path) -> None:
    """Loss and gradient norm, with latent attention and shared experts; the metrics say which way each part went."""
    fused, plain = interpreted(_step, tmp_path)
    for key in ("train/loss", "train/grad_norm", "train/entropy"):
        assert fused[key] == pytest.approx(plain[key], rel=1e-5)
    parts = {key.rpartition("/")[2] for key in plain if key.startswith("perf/fused/")}
    assert parts == {"activation", "attention", "experts", "logprobs", "norms", "permutation"}
    of_triton = {key for key, on in fused.items() if key.startswith("perf/fused/") and on}
    assert of_triton == {f"perf/fused/{part}" for part in parts - {"attention", "experts"}}
    assert not any(plain[f"perf/fused/{part}"] for part in parts)

"""The bytes of separate kernels are those that PyTorch's operations read and write, counted while they execute, and the
formulas' seconds those that the kernels took on an H100.

Not covered: kernels of grouped products with uneven experts, FlashAttention's own kernels (cuDNN's were measured).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_bridge.config import ParallelConfig
from megatron_bridge.model.logprobs import _blocks
from miles_like.device_table import device
from miles_like.timing.layers import LayerSetup, layer_time
from miles_like.timing.of_run import block_columns
from miles_like.timing.published.models import published_shapes
from miles_like.timing.rates.roofline import moved
from miles_like.timing.separate import (
    ADAPTER_INPUT,
    ADAPTER_OUTPUT,
    GATE,
    NORM,
    ROTARY,
    ROUTED,
    Moved,
    Separate,
)
from miles_like.timing.train import TrainSetup, stage_time
from tests.support import toy

N, D, HEADS, RANK, TOP = 512, 128, 16, 16, 4


class Bytes(TorchDispatchMode):
    """Adds up what each operation reads and writes. A view and an allocation move nothing; an expanded operand is read
    once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        held = {x.untyped_storage()._cdata for x in read}
        inplace = func._schema.is_mutable
        view = not inplace and any(x.untyped_storage()._cdata in held for x in written)
        if not view and func is not torch.ops.aten.empty.memory_format:
            self.total += sum(_size(x) for x in [*read, *written])
        return out


def _size(x: Tensor) -> int:
    used = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        used *= size if stride else 1
    return used * x.element_size()


def counted(run: Callable[..., Tensor], *inputs: Tensor) -> Moved:
    """Bytes of a forward and of a backward of `run`."""
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    with Bytes() as forward:
        out = run(*leaves)
    gradient = torch.ones_like(out)
    with Bytes() as backward:
        torch.autograd.grad(out, [x for x in leaves if x.requires_grad], gradient)
    return Moved(forward.total, backward.total)


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def rotary(x: Tensor) -> Tensor:
    angles = torch.ones(N, D, dtype=x.dtype)
    first, second = x[..., : D // 2], x[..., D // 2 :]
    return x * angles + torch.cat((-second, first), dim=-1) * angles


def gate(left: Tensor, right: Tensor) -> Tensor:
    return F.silu(left) * right


def routed(x: Tensor, scores: Tensor, order: Tensor) -> Tensor:
    index = order.reshape(-1, 1).expand(-1, D)
    rows = torch.gather(x, 0, index)
    rows = (rows.to(torch.float32) * scores.reshape(-1, 1)).to(x.dtype)
    return torch.zeros_like(x).scatter_add(0, index, rows)


@pytest.mark.parametrize(
    ("name", "found", "channels", "want"),
    [
        ("norm", lambda: counted(norm, bf16(N, D), bf16(D)), N * D, NORM),
        ("rotary", lambda: counted(rotary, bf16(HEADS, N, D)), HEADS * N * D, ROTARY),
        ("gate", lambda: counted(gate, bf16(N, D), bf16(N, D)), N * D, GATE),
        (
            "routed",
            lambda: counted(routed, bf16(N, D), torch.randn(N * TOP), torch.arange(N).repeat(TOP)),
            N * D * TOP,
            ROUTED,
        ),
    ],
)
def test_an_operation_moves_its_bytes(name: str, found: Callable[[], Moved], channels: int, want: Moved) -> None:
    got = found().times(1 / channels)
    assert got.forward == pytest.approx(want.forward, rel=0.2), (name, got)
    assert got.backward == pytest.approx(want.backward, rel=0.2), (name, got)


def test_an_adapter_moves_its_bytes() -> None:
    """What it adds to a matrix whose input has a gradient."""
    inputs, outputs = 512, 1024
    base = bf16(outputs, inputs)

    def plain(x: Tensor) -> Tensor:
        return x @ base.t()

    def adapted(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        return x @ base.t() + torch.ones(N, 1, dtype=x.dtype) * ((x @ down.t()) @ up.t())

    with_it = counted(adapted, bf16(N, inputs), bf16(RANK, inputs), bf16(outputs, RANK))
    without = counted(plain, bf16(N, inputs))
    for part in ("forward", "backward"):
        want = N * (getattr(ADAPTER_INPUT, part) * inputs + getattr(ADAPTER_OUTPUT, part) * outputs)
        assert getattr(with_it, part) - getattr(without, part) == pytest.approx(want, rel=0.2), part


SHAPES = published_shapes(Path(__file__).parents[3] / "configs")
H100 = device("H100")
# Model, adapters, tokens, ms of a layer's kernels in forward, recomputation and backward under FSDP2 on one GPU
# (docs/plan.md, "Separate kernels").
LAYERS = [
    ("qwen3_0_6b", False, 8192, 8.75),
    ("qwen3_0_6b", False, 16384, 20.7),
    ("qwen3_0_6b", True, 16384, 24.8),
    ("qwen3_4b", False, 16384, 53.8),
    ("qwen3_4b", True, 16384, 57.8),
    ("qwen3_30b_a3b", False, 16384, 66.4),
    ("qwen3_30b_a3b", True, 16384, 69.1),
]


@pytest.mark.parametrize(("model", "adapters", "tokens", "ms"), LAYERS)
def test_a_layer_s_kernels_take_what_was_measured(model: str, adapters: bool, tokens: int, ms: float) -> None:
    shape = SHAPES[model]
    layer = LayerSetup(
        device=H100,
        parallel=ParallelConfig(),
        recompute="full",
        adapters=adapters,
        imbalance=1.0,
        separate=Separate(),
    )
    time = layer_time(shape, layer, tokens, float(tokens) ** 2, moe=shape.is_moe)
    kernels = sum(x for part in (time.forward, time.backward) for name, x in part.items() if name != "host")
    elements = shape.attention + (shape.experts * shape.expert + shape.router if shape.is_moe else shape.dense)
    # FSDP2 on one rank: weights are rounded and copied twice, gradients cast and added up
    shards = moved(elements * (2 * (6 + 4) + (0 if adapters else 6 + 12)), H100)
    assert 1e3 * (kernels + shards) == pytest.approx(ms, rel=0.15)


@pytest.mark.parametrize(
    ("model", "ms"), [("qwen3_0_6b", 157.3), ("qwen3_30b_a3b", 174.2), ("qwen3_4b", 198.4), ("glm45_air", 231.8)]
)
def test_a_head_in_blocks_takes_what_was_measured(model: str, ms: float) -> None:
    layer = LayerSetup(device=H100, parallel=ParallelConfig())
    setup = TrainSetup(layer=layer, pack_tokens=16384, head_columns=2048)
    time = stage_time(SHAPES[model], setup, 16384.0, 16384.0**2)
    assert 1e3 * (time.forward["head"] + time.backward["head"]) == pytest.approx(ms, rel=0.15)


def test_ranks_that_divide_a_layer_are_refused() -> None:
    for more in ({"parallel": ParallelConfig(tp=2)}, {"parallel": ParallelConfig(), "recompute": "selective"}):
        with pytest.raises(ValueError, match="separate kernels"):
            LayerSetup(device=H100, separate=Separate(), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "share", "cp", "mib"), [(16384, 1.0, 1, 64), (16384, 0.8, 2, 64), (512, 0.5, 1, 1)])
def test_the_head_s_blocks_are_the_trainer_s(tokens: int, share: float, cp: int, mib: int) -> None:
    config = toy.config("somewhere", logprob_memory_mib=mib, cp=cp)
    (first, end), *_ = _blocks(round(share * tokens / cp), 10**6, mib << 20)
    assert block_columns(config, tokens, share) == end - first

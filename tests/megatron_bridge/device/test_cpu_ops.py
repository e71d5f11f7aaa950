"""Replaced operations against megatron's and torch's own, which `functools.wraps` keeps within reach."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from megatron_bridge.device.device import init_device
from tests.support.spawn import run_ranks

init_device()

from megatron.core.fusions import fused_bias_swiglu  # noqa: E402
from megatron.core.optimizer import clip_grads  # noqa: E402
from megatron.core.transformer.moe import token_dispatcher  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is replaced on CUDA")


def _both(owner: Any, name: str) -> tuple[Any, Any]:
    ours = getattr(owner, name)
    stock = inspect.unwrap(ours)
    assert stock is not ours
    return ours, stock


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_way_back_through_swiglu_is_megatron_s(dtype: torch.dtype) -> None:
    """With and without token weights, in both dtypes; results have megatron's dtypes."""
    torch.manual_seed(0)
    g, y = torch.randn(9, 6, dtype=dtype), torch.randn(9, 12, dtype=dtype)
    kept = g.clone(), y.clone()
    weights = torch.rand(9, 1)
    pairs = [tuple(f(g, y) for f in _both(fused_bias_swiglu, "swiglu_back"))]
    pairs += zip(*(f(g, y, weights) for f in _both(fused_bias_swiglu, "weighted_swiglu_back")), strict=True)
    bound = 1e-6 if dtype is torch.float32 else 3e-2
    for got, want in pairs:
        assert got.dtype is want.dtype and got.shape == want.shape
        torch.testing.assert_close(got, want, atol=bound, rtol=bound)
    assert torch.equal(g, kept[0]) and torch.equal(y, kept[1]), "an argument was changed"


def test_rows_are_added_up_as_megatron_adds_them() -> None:
    """Forward bitwise, and the gradient; an index that is hit twice and one that is not."""
    torch.manual_seed(0)
    rows, index = torch.randn(6, 4, requires_grad=True), torch.tensor([0, 3, 3, 1, 0, 3])
    grad, shape = torch.randn(5, 4), torch.Size((5, 4))
    found = []
    for f in _both(token_dispatcher, "unpermute"):
        out = f(rows, index, restore_shape=shape)
        found.append((out, *torch.autograd.grad(out, rows, grad)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_clipping_and_the_norm_of_all_gradients_are_megatron_s() -> None:
    """One list onto itself is scaled in place, another is copied; the norm is that of all values."""
    torch.manual_seed(0)
    tensors, flag = [torch.randn(3, 4), torch.randn(7)], torch.zeros(1, dtype=torch.int)
    ours, stock = (f(1, flag, [tensors], False)[0] for f in _both(clip_grads, "l2_norm_impl"))
    assert ours.shape == stock.shape
    torch.testing.assert_close(ours, stock)
    want = [0.25 * t for t in tensors]
    copies = [torch.empty_like(t) for t in tensors]
    clip_grads.multi_tensor_scale_impl(1, flag, [tensors, copies], 0.25)
    assert all(map(torch.equal, copies, want))
    clip_grads.multi_tensor_scale_impl(1, flag, [tensors, tensors], 0.25)
    assert all(map(torch.equal, tensors, want))


def _alone(rank: int, world: int, port: int) -> list[list[float]]:
    """A sum over a group of this rank alone and over all, plain and coalesced."""
    import torch.distributed as dist

    init_device()
    from megatron.core.distributed import param_and_grad_buffer as buffers

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    groups = [dist.new_group([r]) for r in range(world)]
    out = []
    for group in (groups[rank], dist.group.WORLD):
        plain, coalesced = torch.full((4,), float(rank + 1)), torch.full((4,), float(rank + 1))
        dist.all_reduce(plain, group=group)
        with buffers._coalescing_manager(group, async_ops=True) as handle:
            shard = coalesced if group.size() == 1 else coalesced[2 * rank : 2 * rank + 2]
            buffers.dist_reduce_scatter_func(shard, coalesced, group=group, async_op=True)
        handle.wait()
        out.append(plain.tolist() + shard.tolist())
    dist.destroy_process_group()
    return out


def test_one_rank_alone_waits_for_nobody_and_two_add_up() -> None:
    for rank, (alone, together) in enumerate(run_ranks(_alone, 2, keep=True)):
        assert alone == [rank + 1.0] * 8
        assert together == [3.0] * 6

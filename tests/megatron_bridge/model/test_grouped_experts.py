"""All experts at once against megatron's own, one after the other. Letters: T tokens, E local experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.spawn import run_ranks
from tests.support.tiny_models import leave, megatron_rank, tiny

COUNTS = [3, 0, 17, 1, 64, 2, 0, 5]


def _compare(rank: int, world: int, port: int, dtype: str, frozen: bool, watched: bool) -> dict[str, float]:
    """Largest difference of the output and of each gradient, relative to the largest value."""
    chunks, _ = megatron_rank(tiny(n_routed_experts=8, n_group=1, topk_group=1), rank, world, port, dtype)
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_bridge.model.grouped_experts import LocalGroupedMLP
    from megatron_bridge.model.weight_functions import use_weight_function

    torch.manual_seed(0)
    experts: Any = next(m for m in chunks[0].modules() if isinstance(m, LocalGroupedMLP))
    fc1 = [e.linear_fc1 for e in experts.local_experts]
    fc1[2].weight.requires_grad_(not frozen)
    use_weight_function(fc1[4], lambda w: 2 * w)
    watches: list[int] = []
    waits: list[Any] = []
    for linear in fc1:
        linear.register_forward_pre_hook(lambda module, args: waits.append(len(args[0])))
    if watched:
        fc1[3].register_forward_hook(lambda *_: None)
        experts.local_experts[5].linear_fc2.register_full_backward_hook(lambda *_: watches.append(5))
    t, h = sum(COUNTS), 128
    x = torch.randn(t, h, dtype=getattr(torch, dtype), requires_grad=True)
    probs = torch.rand(t, requires_grad=True)
    grad = torch.randn(t, h).to(x.dtype)
    values = [x, probs, *(p for p in experts.parameters() if p.requires_grad)]
    counts = torch.tensor(COUNTS)
    found = []
    for forward in (experts.forward, lambda *a: SequentialMLP.forward(experts, *a)):
        out, _ = forward(x, counts, probs)
        found.append([out, *torch.autograd.grad(out, values, grad)])
        assert len(watches) == watched * len(found), "a hook on a linear was not called"
        assert len(waits) >= len(fc1) * len(found), "a hook before a linear was not called"
    leave()
    names = ["output", "x", "probs", *(n for n, p in experts.named_parameters() if p.requires_grad)]
    return {
        n: float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-9))
        for n, a, b in zip(names, *found, strict=True)
    }


@pytest.mark.parametrize(
    ("dtype", "frozen", "watched", "bound"),
    [("float32", False, False, 1e-5), ("float32", True, True, 1e-5), ("bfloat16", False, False, 2e-2)],
)
def test_experts_at_once_are_experts_one_by_one(dtype: str, frozen: bool, watched: bool, bound: float) -> None:
    """Experts without tokens, a frozen and an effective weight, one that is watched by a hook; bf16's padded rows.
    Oracle: megatron's SequentialMLP.forward on the same module. Not covered: ETP (a rank's experts know nothing of it).
    """
    [found] = run_ranks(_compare, 1, dtype, frozen, watched, keep=True)
    assert len(found) == 3 + 16 - frozen
    assert all(d <= bound for d in found.values()), found

"""One grouped product against the loop over experts, by torch's CPU implementation of the same operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_bridge.device.device import init_device

init_device()

from megatron_bridge.model.grouped_experts import GroupedLinear  # noqa: E402
from megatron_bridge.model.kernels.grouped_product import GroupedProduct, supports  # noqa: E402


def _results(function: type[torch.autograd.Function], sizes: list[int], frozen: int) -> list[Tensor]:
    """Output and gradients."""
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), 24, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(16, 24, dtype=torch.bfloat16, requires_grad=i >= frozen) for i in range(len(sizes))]
    out = function.apply(x, sizes, *weights)
    trained = [x, *(w for w in weights if w.requires_grad)]
    return [out, *torch.autograd.grad(out, trained, torch.randn_like(out))]


@pytest.mark.parametrize(("sizes", "frozen"), [([3, 0, 17, 1, 0], 0), ([5], 0), ([0, 0, 9], 2), ([4, 4], 2)])
def test_it_is_the_loop(sizes: list[int], frozen: int) -> None:
    """Experts without tokens, whose gradients are zero; frozen weights have none. BF16, sums in another order."""
    found, want = (_results(f, sizes, frozen) for f in (GroupedProduct, GroupedLinear))
    assert len(found) == len(want) == 2 + len(sizes) - frozen
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-1, rtol=2e-2)
    if not sizes[0] and not frozen:
        assert not found[2].any()


def test_a_cpu_has_the_loop() -> None:
    x = torch.zeros(4, 8, dtype=torch.bfloat16)
    assert not supports(x, [x])

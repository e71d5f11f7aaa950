"""The order of routed rows against megatron's own. The sum back is a Triton kernel: tests/.../kernels, tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_bridge.device.device import init_device

init_device()

from megatron.core.transformer.moe import token_dispatcher  # noqa: E402

from megatron_bridge.model.permutation import row_order, sort_on_devices  # noqa: E402


def _routing(tokens: int, experts: int, seed: int) -> Tensor:
    """[T, E] bool, rows with none to all experts; the first expert has no token."""
    g = torch.Generator().manual_seed(seed)
    routed = torch.rand(tokens, experts, generator=g) < torch.rand(tokens, 1, generator=g)
    routed[:, 0] = False
    return routed


@pytest.mark.parametrize(("tokens", "experts"), [(1, 2), (13, 5), (64, 8)])
def test_rows_are_in_megatron_s_order(tokens: int, experts: int) -> None:
    """By expert and by token: rows, weights, and which rows are a token's."""
    sort_on_devices()
    routed = _routing(tokens, experts, tokens)
    x, probs, count = torch.randn(tokens, 3), torch.rand(tokens, experts), int(routed.sum())
    rows, weights, sources = token_dispatcher.permute(x, routed, probs=probs, num_out_tokens=count)
    order, elements = row_order(routed, count)
    assert torch.equal(order.sources, sources) and torch.equal(x[order.sources], rows)
    assert torch.equal(probs.flatten()[elements], weights)
    back = torch.zeros(tokens, 3)
    for token in range(tokens):
        back[token] = rows[order.places[order.ends[token] : order.ends[token + 1]]].sum(0)
    stock = token_dispatcher.unpermute(rows, sources, restore_shape=x.shape, routing_map=routed)
    torch.testing.assert_close(back, stock)


def test_on_a_cpu_the_functions_are_megatron_s() -> None:
    sort_on_devices()
    sort_on_devices()
    stock = token_dispatcher.permute.of_megatron
    assert not hasattr(stock, "of_megatron")
    x, routed = torch.randn(5, 2), _routing(5, 3, 1)
    for a, b in zip(token_dispatcher.permute(x, routed), stock(x, routed), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)

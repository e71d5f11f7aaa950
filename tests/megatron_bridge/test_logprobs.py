"""Chunked, vocabulary-parallel log-probabilities. Letters: n rows, H hidden size, V vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.spawn import run_ranks

N, H, V, TEMPERATURE = 23, 16, 40, 0.7


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(N, H, generator=g), torch.randn(V, H, generator=g)
    return hidden, weight, torch.randint(0, V, (N,), generator=g), torch.randn(N, generator=g)


def _oracle() -> dict[str, Tensor]:
    hidden, weight, labels, slope = _inputs()
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    full = torch.log_softmax(h @ w.t() / TEMPERATURE, -1)
    picked = full.gather(1, labels[:, None])[:, 0]
    picked.backward(slope)
    entropy = torch.distributions.Categorical(logits=full.detach()).entropy()
    return {"logprobs": picked.detach(), "entropy": entropy, "hidden": h.grad, "weight": w.grad}


def _ranks(rank: int, world: int, port: int, chunks: list[int]) -> list[dict[str, Any]]:
    import torch.distributed as dist

    from megatron_bridge.logprobs import label_logprobs

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    group = dist.group.WORLD
    out = []
    for chunk in chunks:
        hidden, weight, labels, slope = _inputs()
        h, w = hidden.requires_grad_(), weight.chunk(world)[rank].clone().requires_grad_()
        logprobs, entropy = label_logprobs(h, w, labels, temperature=TEMPERATURE, chunk=chunk, group=group)
        logprobs.backward(slope)
        dist.all_reduce(h.grad)
        out.append({"logprobs": logprobs.detach(), "entropy": entropy, "hidden": h.grad, "weight": w.grad})
        assert not entropy.requires_grad
    none, _ = label_logprobs(h[:0], w, labels[:0], temperature=1.0, chunk=4, group=group)
    none.sum().backward()
    assert none.shape == (0,)
    dist.destroy_process_group()
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_they_are_log_softmax_of_whole_logits(world: int) -> None:
    """Values and both gradients are those of torch's log_softmax(hidden weight^T / temperature), whatever the chunk and
    however the vocabulary is split; no row with loss is no error. Not covered: bf16, where logits round first."""
    want = _oracle()
    ranks = run_ranks(_ranks, world, [5, N, 1000])
    for i in range(3):
        for rank in range(world):
            got = ranks[rank][i]
            torch.testing.assert_close(got["logprobs"], want["logprobs"], atol=2e-6, rtol=1e-5)
            torch.testing.assert_close(got["entropy"], want["entropy"], atol=2e-6, rtol=1e-5)
            torch.testing.assert_close(got["hidden"], want["hidden"], atol=5e-6, rtol=1e-5)
        weight = torch.cat([ranks[r][i]["weight"] for r in range(world)])
        torch.testing.assert_close(weight, want["weight"], atol=5e-6, rtol=1e-5)

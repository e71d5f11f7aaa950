"""Packed attention and the duplicated linear. Letters: T packed tokens, h heads, d query/key size, v value size."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_bridge.device.device import init_device

init_device()

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402

from megatron_bridge.model.local_modules import SequenceParallelRMSNorm, localize, packed_causal_attention  # noqa: E402
from megatron_bridge.model.router import MaskedRouter  # noqa: E402
from routing_replay.align import zigzag_index  # noqa: E402


def _reference(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Segment by segment, softmax written out, in fp64."""
    outs, start = [], 0
    for n in lengths:
        a, b, c = (x[start : start + n].double().transpose(0, 1) for x in (q, k, v))
        scores = (a @ b.transpose(1, 2) * scale).masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        outs.append((scores.softmax(-1) @ c).transpose(0, 1))
        start += n
    return torch.cat(outs)


@pytest.mark.parametrize(
    "lengths",
    [
        [7],
        [5, 5, 5],
        [6] * 4,
        [3] * 8,
        [1, 16, 3, 17, 2, 40],
        [40, 33, 17, 17, 16, 9, 9, 3],
        [12] * 30 + [100],
        [1030, 3, 1500, 9],
        [4, 0, 6],
    ],
    ids=[
        "one",
        "equal",
        "pairs",
        "fours",
        "mixed",
        "sorted",
        "many short, one long",
        "long ones alone",
        "an empty one",
    ],
)
@pytest.mark.parametrize("v", [8, 12])
def test_packed_attention_is_attention_of_each_segment(lengths: list[int], v: int) -> None:
    """Grouping segments by length and padding them must not let any token see another segment or padding, forward or
    backward. Oracle: the formula in fp64. Values narrower than keys are MLA's case. Not covered: bf16, CUDA."""
    torch.manual_seed(0)
    t, scale = sum(lengths), 0.3
    q, k = (torch.randn(t, 2, 12, requires_grad=True) for _ in range(2))
    values = torch.randn(t, 2, v, requires_grad=True)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    got, want = packed_causal_attention(q, k, values, cu, scale), _reference(q, k, values, lengths, scale)
    assert got.shape == (t, 2, v)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)
    weights = torch.randn(t, 2, v)
    ours = torch.autograd.grad(got, (q, k, values), weights)
    theirs = torch.autograd.grad(want, (q, k, values), weights.double())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_torch_s_and_its_gradient_autograd_s(dtype: torch.dtype) -> None:
    """Bitwise forward; backward within a rounding of the dtype. Not covered: CUDA."""
    torch.manual_seed(0)
    norm = SequenceParallelRMSNorm(SimpleNamespace(sequence_parallel=False), 24, eps=1e-2).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x, grad = torch.randn(5, 3, 24, dtype=dtype, requires_grad=True), torch.randn(5, 3, 24, dtype=dtype)
    got, want = norm(x), F.rms_norm(x, (24,), norm.weight, 1e-2)
    assert torch.equal(got, want)
    exact = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    theirs = torch.autograd.grad(F.rms_norm(exact[0], (24,), exact[1], 1e-2), exact, grad.double())
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    for a, b in zip(torch.autograd.grad(got, (x, norm.weight), grad), theirs, strict=True):
        assert a.dtype is dtype
        torch.testing.assert_close(a.double(), b, atol=bound, rtol=bound)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("lengths", [[16], [8, 24, 8], [16] * 9 + [200], [1032, 8, 1504, 16], [8, 0, 16]])
def test_context_parallel_ranks_together_attend_as_one(lengths: list[int], size: int) -> None:
    """Each rank has two chunks of every segment and all keys; what it answers, and the gradients that all answers give
    together, are those of the whole pack, whatever group a chunk came into. Oracle: the formula in fp64."""
    torch.manual_seed(0)
    t, scale = sum(lengths), 0.3
    q, k = (torch.randn(t, 2, 12, requires_grad=True) for _ in range(2))
    values = torch.randn(t, 2, 8, requires_grad=True)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    mine = [zigzag_index(cu, r, size) for r in range(size)]
    order = torch.cat(mine)  # as an all-gather lays the ranks' rows
    parts = [
        packed_causal_attention(q[mine[r]], k[order], values[order], cu, scale, rank=r, size=size) for r in range(size)
    ]
    want = _reference(q, k, values, lengths, scale)
    got = torch.cat(parts)
    torch.testing.assert_close(got.double(), want[order], atol=2e-5, rtol=1e-4)
    weights = torch.randn(t, 2, 8)
    ours = torch.autograd.grad(got, (q, k, values), weights[order])
    theirs = torch.autograd.grad(want, (q, k, values), weights.double())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-3)


def test_bf16_keeps_its_type_and_fp32_accuracy() -> None:
    """On CPU the scores are computed in fp32 from bf16 inputs: only the output is rounded."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(20, 2, 8).bfloat16() for _ in range(3))
    got = packed_causal_attention(q, k, v, torch.tensor([0, 9, 20], dtype=torch.int32), 0.4)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.double(), _reference(q, k, v, [9, 11], 0.4), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("te", [False, True])
def test_every_spec_has_the_router_that_knows_padding(te: bool) -> None:
    """Each router is handed a padding mask, which the stock one combines with its counts in the wrong shape: no spec
    may keep it. Of TransformerEngine's nothing else is replaced; that library is absent here, so a local spec stands
    for it."""
    stock = get_gpt_layer_local_spec(num_experts=4, multi_latent_attention=True)
    ours = localize(stock, te=te)
    assert stock.submodules.mlp.submodules.router is TopKRouter, "the stock spec was changed"
    assert ours.submodules.mlp.submodules.router is MaskedRouter
    before, after = (x.submodules.self_attention.submodules.core_attention for x in (stock, ours))
    assert (before is after) == te

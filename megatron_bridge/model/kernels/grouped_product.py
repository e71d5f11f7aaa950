"""The experts' linears as one grouped matrix product each, by torch's CUTLASS kernel.

Letters: T tokens of all local experts, E local experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def on_device(x: Tensor) -> bool:
    """Whether x is on a CUDA device, and real: fake tensors take the plain way."""
    return x.is_cuda and not isinstance(x, FakeTensor)


def supports(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether torch's kernel takes these tensors: BF16 on a CUDA device, rows of a multiple of 16 bytes."""
    out, inputs = weights[0].shape
    bf16 = x.dtype is torch.bfloat16 and all(w.dtype is torch.bfloat16 for w in weights)
    return on_device(x) and bf16 and out % 8 == 0 and inputs % 8 == 0 and len(x) > 0


class GroupedProduct(torch.autograd.Function):
    """As `GroupedLinear`: runs of `sizes` rows of x [T, in], run i times the transpose of weight i [out, in].

    Each weight is a separate parameter, and the kernel wants them side by side: they are copied, in forward and again
    in backward rather than kept. A copy of 1 GB takes 0.5 ms on an H200.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], *weights: Tensor) -> Tensor:
        x = x.contiguous()
        ends = _ends(sizes, x.device)
        ctx.sizes = sizes
        ctx.save_for_backward(x, ends, *weights)
        return torch._grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        of_x = torch._grouped_mm(grad, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        needed = ctx.needs_input_grad[2:]
        if not any(needed):
            return of_x, None, *([None] * len(weights))
        of_weights = torch._grouped_mm(grad.t(), x, offs=ends)  # [E, out, in]
        for run, size in zip(of_weights, ctx.sizes, strict=True):
            if not size:
                run.zero_()  # the kernel has nothing to write there
        return of_x, None, *(g if wanted else None for g, wanted in zip(of_weights, needed, strict=True))


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    """[E] int32: where each run ends."""
    return torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32).to(device, non_blocking=True)

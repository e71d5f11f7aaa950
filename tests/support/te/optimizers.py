"""Multi-tensor functions of TransformerEngine's extension in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def multi_tensor_adam(
    chunk_size: int,
    noop: Tensor,
    lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: Any,
    adamw: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """AdamW (`adamw`) or Adam with L2 in place, on gradients, parameters and both moments; a fifth list holds FP32
    masters, whose rounded values the parameters then are."""
    count = int(step)
    first, second = (1 - beta1**count, 1 - beta2**count) if bias_correction else (1.0, 1.0)
    for grad, param, mean, square, *master in zip(*lists, strict=True):
        value = (master[0] if master else param).float()
        g = grad.float() if adamw else grad.float() + weight_decay * value
        new_mean = beta1 * mean.float() + (1 - beta1) * g
        new_square = beta2 * square.float() + (1 - beta2) * g * g
        update = (new_mean / first) / ((new_square / second).sqrt() + eps)
        if adamw:
            update = update + weight_decay * value
        mean.copy_(new_mean), square.copy_(new_square)
        value = value - lr * update
        for target in (param, *master):
            target.copy_(value)


def multi_tensor_l2norm(
    chunk_size: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """(norm of all elements of all tensors [1] fp32, norms of each with `per_tensor`)."""
    norms = torch.stack([x.float().norm() for x in lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else norms.new_empty(0)


def multi_tensor_scale(chunk_size: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    """The second list's tensors become the first's times `scale`; `noop` becomes 1 where one is not finite."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * scale)
        if not torch.isfinite(source).all():
            noop.fill_(1)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "multi_tensor_adam": multi_tensor_adam,
    "multi_tensor_l2norm": multi_tensor_l2norm,
    "multi_tensor_scale": multi_tensor_scale,
}

"""Log-probability and entropy of labels straight from hidden states, without a [T, V] tensor in fp32.

Letters: n rows with loss, H hidden size, V vocabulary, v = V / tp this rank's share of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup


class _LabelLogprobs(torch.autograd.Function):
    """Logits are made chunk by chunk in forward and again in backward; between the two only [n] numbers are kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, chunk: int, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        first = group.rank() * weight.shape[0]
        parts = [
            _chunk_forward(hidden[a : a + chunk], weight, labels[a : a + chunk] - first, temperature, group)
            for a in range(0, max(len(hidden), 1), chunk)
        ]
        logprobs, entropy, lse = (torch.cat(x) for x in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, labels, lse)
        ctx.temperature, ctx.chunk, ctx.first = temperature, chunk, first
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _entropy: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:  # type: ignore[override]
        hidden, weight, labels, lse = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for a in range(0, len(hidden), ctx.chunk):
            rows = slice(a, a + ctx.chunk)
            # d log p(label) / d logits = onehot(label) - p, and logits were divided by the temperature
            slope = F.linear(hidden[rows], weight).float().div_(ctx.temperature)
            slope.sub_(lse[rows, None]).exp_().neg_()
            local, mine = _local(labels[rows] - ctx.first, len(weight))
            slope.scatter_add_(1, local[:, None], mine.float()[:, None])
            slope = slope.mul_(grad[rows, None] / ctx.temperature).to(weight.dtype)
            torch.mm(slope, weight, out=grad_hidden[rows])
            grad_weight += slope.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _local(labels: Tensor, share: int) -> tuple[Tensor, Tensor]:
    """Labels counted from this rank's first -> (clamped to its share, whether they are in it)."""
    return labels.clamp(0, share - 1), (labels >= 0) & (labels < share)


def _chunk_forward(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(label), entropy and log-sum-exp of one chunk, each [rows] fp32; labels count from this rank's first."""
    logits = F.linear(hidden, weight).float().div_(temperature)  # [rows, v]
    top = logits.amax(1)
    if group.size() > 1:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    logits.sub_(top[:, None])
    local, mine = _local(labels, len(weight))
    picked = logits.gather(1, local[:, None])[:, 0] * mine
    exps = logits.exp()
    sums = torch.stack([exps.sum(1), (exps * logits).sum(1), picked])  # [3, rows]
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    log_z = sums[0].log()
    return sums[2] - log_z, log_z - sums[1] / sums[0], top + log_z


def label_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float, chunk: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """log p(label) and the entropy of p, p = softmax(hidden weight^T / temperature).

    hidden [n, H] in the model's dtype, the same on every rank of `group` (its gradient is this rank's partial sum:
    enter through a mapping that adds it up); weight [v, H], this rank's rows of the vocabulary; labels [n] int64.
    Returns ([n] fp32, carries the gradient; [n] fp32, no gradient), the same on every rank. At most [chunk, v] logits
    exist at a time. The matrix product rounds logits to the model's dtype; everything after it is fp32.
    """
    logprobs, entropy = _LabelLogprobs.apply(hidden, weight, labels, temperature, chunk, group)
    return logprobs, entropy

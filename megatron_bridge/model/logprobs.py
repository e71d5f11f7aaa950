"""Log-probability and entropy of labels computed from hidden states without a [T, V] tensor.

Letters: n rows with loss, L labels per row (the token, then any candidates), H hidden size, V vocabulary, v = V / tp
this rank's shard of it, b tokens of a block of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_bridge.model.kernels.chosen import by_triton
from quant.exact import logprobs, products

_BYTES = 8  # temporaries per logit of a block: two fp32, or fp32 and the model's dtype. With Triton the product alone


class _LabelLogprobs(torch.autograd.Function):
    """Computes logits block by block in forward and again in backward; only [n] numbers are saved in between.

    Blocks divide the vocabulary, not the rows: a block of the weight's gradient is then one product over all rows,
    rounded once, and no fp32 copy of that gradient exists (with 129,280 tokens it is the largest tensor of all).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        memory: int,
        group: ProcessGroup,
        exact: bool,
    ) -> tuple[Tensor, Tensor]:
        labels = labels - group.rank() * len(weight)  # relative to this rank's shard; outside it: another rank's label
        whole = _exact_sums if exact else _sums
        ctx.fused = by_triton("logprobs", hidden) and not exact
        top, (z, weighted, *picked) = whole(hidden, weight, labels, temperature, memory, group)
        log_z = z.log()
        lse = top + log_z
        entropy = log_z - weighted / z
        ctx.save_for_backward(hidden, weight, labels, lse, entropy)
        ctx.temperature, ctx.memory = temperature, memory
        ctx.set_materialize_grads(False)
        return torch.stack(picked, 1) - lse[:, None], entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, labels, lse, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad = lse.new_zeros(labels.shape) if grad is None else grad
        grad = grad / ctx.temperature  # [n, L]; logits were divided by the temperature
        if of_entropy is not None:
            of_entropy = (of_entropy / ctx.temperature)[:, None]
        of_logit = hidden.element_size() if ctx.fused else _BYTES
        for a, b in _blocks(len(hidden), len(weight), ctx.memory, of_logit):
            if ctx.fused:
                slope = F.linear(hidden, weight[a:b])
                slope = _kernels().slope_in_place(slope, labels, a, ctx.temperature, lse, entropy, grad, of_entropy)
            else:
                slope = _logits(hidden, weight[a:b], ctx.temperature).sub_(lse[:, None])  # [n, b]: log p
                slope = _slope(slope, labels - a, grad, of_entropy, entropy[:, None]).to(weight.dtype)
            grad_hidden += slope @ weight[a:b]
            if grad_weight is not None:
                torch.mm(slope.t(), hidden, out=grad_weight[a:b])
            del slope  # before the next block is allocated
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None


def _slope(log_p: Tensor, labels: Tensor, grad: Tensor, of_entropy: Tensor | None, entropy: Tensor) -> Tensor:
    """Gradient of a block's logits [n, b], in log_p's memory: sum over labels of grad [n, L] times d log p(label) /
    d logits = onehot(label) - p, plus of_entropy [n, 1] times d entropy / d logits = -p (log p + entropy)."""
    local, mine = _local(labels, log_p.shape[1])
    if of_entropy is None and labels.shape[1] == 1:
        return log_p.exp_().neg_().scatter_add_(1, local, mine.float()).mul_(grad)
    of_p = grad.sum(1, keepdim=True)
    if of_entropy is None:
        slope = log_p.exp_().mul_(of_p)
    else:
        p = log_p.exp()
        slope = log_p.add_(entropy).mul_(of_entropy).add_(of_p).mul_(p)
    return slope.neg_().scatter_add_(1, local, grad * mine)


def _kernels() -> Any:
    from megatron_bridge.model.kernels import logits

    return logits


def _blocks(rows: int, share: int, memory: int, of_logit: int = _BYTES) -> Iterator[tuple[int, int]]:
    """Ranges [a, b) of this rank's `share` of the vocabulary; a block's temporaries take at most `memory` bytes."""
    size = max(1, memory // (of_logit * max(rows, 1)))
    size -= size % 64 if size > 64 else 0  # matrix products are fastest at multiples of 64
    for a in range(0, share, size):
        yield a, min(a + size, share)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[n, b] fp32, newly allocated."""
    return F.linear(hidden, weight).float().div_(temperature)


def _local(labels: Tensor, share: int) -> tuple[Tensor, Tensor]:
    """Labels relative to a share -> (clamped to the share, whether they are in it)."""
    return labels.clamp(0, share - 1), (labels >= 0) & (labels < share)


def _softmax_sums(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, memory: int
) -> tuple[Tensor, Tensor]:
    """Over this rank's share: the largest logit m [n], and [2 + L, n] fp32: sum of e^(l - m), sum of
    e^(l - m) (l - m), and each label's logit (0 where another rank has it)."""
    top = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
    sums = torch.zeros(2 + labels.shape[1], len(hidden), device=hidden.device)
    fused = by_triton("logprobs", hidden)
    for a, b in _blocks(len(hidden), len(weight), memory, hidden.element_size() if fused else _BYTES):
        if fused:
            _kernels().add_block(F.linear(hidden, weight[a:b]), labels, a, temperature, top, sums)
            continue
        logits = _logits(hidden, weight[a:b], temperature)  # [n, b]
        local, mine = _local(labels - a, b - a)
        sums[2:] += torch.where(mine, logits.gather(1, local), 0.0).t()
        higher = torch.maximum(top, logits.amax(1))
        logprobs.rescale(sums, top - higher)
        top = higher
        exps = logits.sub_(top[:, None]).exp()
        sums[0] += exps.sum(1)
        sums[1] += exps.mul_(logits).sum(1)
        del logits, exps  # before the next block is allocated
    return top, sums


def _sums(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, memory: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """`_softmax_sums` over all ranks' shares."""
    top, sums = _softmax_sums(hidden, weight, labels, temperature, memory)
    if group.size() > 1:
        mine = top
        top = top.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        logprobs.rescale(sums, mine - top)
        dist.all_reduce(sums, group=group)
    return top, sums


def _exact_sums(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, memory: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """The same with the embedded engine's operations. Blocks have a fixed size and order, so `memory` limits the number
    of rows."""
    at_once = max(products.FULL, memory // (_BYTES * min(logprobs.COLUMNS, len(weight))))
    found = []
    for rows, own in zip(hidden.split(at_once), labels.split(at_once), strict=True):

        def logits(a: int, b: int, rows: Tensor = rows) -> Tensor:
            return products.linear(rows, weight[a:b]).float().div_(temperature)

        found.append(logprobs.shard_sums(logits, len(weight), own))
    top, sums = (torch.cat(batches, -1) for batches in zip(*found, strict=True))
    if group.size() == 1:
        return top, sums
    mine = torch.cat([top[None], sums])
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    return logprobs.joined([of[0] for of in every], [of[1:] for of in every])


def label_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    memory: int,
    group: ProcessGroup,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """log p of each label and the entropy of p, p = softmax(hidden weight^T / temperature).

    hidden [n, H] in the model's dtype, the same on every rank of `group` (its gradient is this rank's partial sum: pass
    it through a mapping that sums it); weight [v, H], this rank's rows of the vocabulary; labels [n, L] int64. Returns
    ([n, L] fp32; [n] fp32), the same on every rank; both carry the gradient, and an unused entropy costs nothing in
    backward. The matrix product rounds logits to the model's dtype; everything after it is fp32.

    Logits exist for one block of the vocabulary at a time; they and their temporaries take at most `memory` bytes (or
    one column; `exact`: a fixed number of columns and at least 16 rows). The only other allocations are the gradients
    of hidden (in fp32 too) and weight, and [n] numbers.

    exact: the bits that `quant.exact.logprobs` defines, equal to the embedded engine's; backward is unchanged.
    """
    picked, entropy = _LabelLogprobs.apply(hidden, weight, labels, temperature, memory, group, exact)  # type: ignore[no-untyped-call]
    return picked, entropy

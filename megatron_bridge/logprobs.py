"""Log-probability and entropy of labels straight from hidden states, without a [T, V] tensor.

Letters: n rows with loss, L labels a row (the token, then any candidates), H hidden size, V vocabulary, v = V / tp this
rank's share of it, b tokens of a block of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from quant.exact import logprobs, products

_BYTES = 8  # of a block's temporaries for each of its logits: two fp32, or fp32 and the model's dtype


class _LabelLogprobs(torch.autograd.Function):
    """Logits are made block by block in forward and again in backward; between the two only [n] numbers are kept.

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
        labels = labels - group.rank() * len(weight)  # counted from this rank's first; outside its share: another's
        whole = _exact_sums if exact else _sums
        top, (z, weighted, *picked) = whole(hidden, weight, labels, temperature, memory, group)
        log_z = z.log()
        lse = top + log_z
        entropy = log_z - weighted / z
        ctx.save_for_backward(hidden, weight, labels, lse, entropy)
        ctx.temperature, ctx.memory = temperature, memory
        ctx.set_materialize_grads(False)
        return torch.stack(picked, 1) - lse[:, None], entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_entropy: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        hidden, weight, labels, lse, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad = lse.new_zeros(labels.shape) if grad is None else grad
        grad = grad / ctx.temperature  # [n, L]; logits were divided by the temperature
        if of_entropy is not None:
            of_entropy = (of_entropy / ctx.temperature)[:, None]
        for a, b in _blocks(len(hidden), len(weight), ctx.memory):
            slope = _logits(hidden, weight[a:b], ctx.temperature).sub_(lse[:, None])  # [n, b]: log p
            slope = _slope(slope, labels - a, grad, of_entropy, entropy[:, None]).to(weight.dtype)
            grad_hidden += slope @ weight[a:b]
            if grad_weight is not None:
                torch.mm(slope.t(), hidden, out=grad_weight[a:b])
            del slope  # before the next block is made
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None


def _slope(log_p: Tensor, labels: Tensor, grad: Tensor, of_entropy: Tensor | None, entropy: Tensor) -> Tensor:
    """[n, b] over a block, in log_p's memory: of sum over labels of grad [n, L] times d log p(label) / d logits, which
    is onehot(label) - p, and of_entropy [n, 1] times d entropy / d logits, which is -p (log p + entropy)."""
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


def _blocks(rows: int, share: int, memory: int) -> Iterator[tuple[int, int]]:
    """[a, b) over this rank's `share` of the vocabulary, so that one block's temporaries are at most `memory` bytes."""
    size = max(1, memory // (_BYTES * max(rows, 1)))
    size -= size % 64 if size > 64 else 0  # what matrix products are fastest at
    for a in range(0, share, size):
        yield a, min(a + size, share)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[n, b] fp32, a tensor of its own."""
    return F.linear(hidden, weight).float().div_(temperature)


def _local(labels: Tensor, share: int) -> tuple[Tensor, Tensor]:
    """Labels counted from a share's first -> (clamped to the share, whether they are in it)."""
    return labels.clamp(0, share - 1), (labels >= 0) & (labels < share)


def _rescale(sums: Tensor, gap: Tensor) -> None:
    """Sums that were taken below one maximum -> below a higher one; gap [n] = old maximum - new, -inf for none yet."""
    z, weighted = sums[0], sums[1]
    factor = gap.exp()
    # Sum of e^(l - new) (l - new) = e^gap (sum of e^(l - old) (l - old) + gap * sum of e^(l - old))
    weighted.addcmul_(gap.clamp(min=-1e30), z).mul_(factor)
    z.mul_(factor)


def _softmax_sums(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, memory: int
) -> tuple[Tensor, Tensor]:
    """Over this rank's share: the greatest logit m [n], and [2 + L, n] fp32: sum of e^(l - m), sum of
    e^(l - m) (l - m), and each label's logit (0 where another rank has it)."""
    top = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
    sums = torch.zeros(2 + labels.shape[1], len(hidden), device=hidden.device)
    for a, b in _blocks(len(hidden), len(weight), memory):
        logits = _logits(hidden, weight[a:b], temperature)  # [n, b]
        local, mine = _local(labels - a, b - a)
        sums[2:] += torch.where(mine, logits.gather(1, local), 0.0).t()
        higher = torch.maximum(top, logits.amax(1))
        _rescale(sums, top - higher)
        top = higher
        exps = logits.sub_(top[:, None]).exp()
        sums[0] += exps.sum(1)
        sums[1] += exps.mul_(logits).sum(1)
        del logits, exps  # before the next block is made
    return top, sums


def _sums(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, memory: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """`_softmax_sums` over the shares of all ranks."""
    top, sums = _softmax_sums(hidden, weight, labels, temperature, memory)
    if group.size() > 1:
        mine = top
        top = top.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        _rescale(sums, mine - top)
        dist.all_reduce(sums, group=group)
    return top, sums


def _exact_sums(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, memory: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """The same by the operations that the embedded engine computes by: blocks have a fixed size and their order, so
    rows are what `memory` divides."""
    at_once = max(products.FULL, memory // (_BYTES * min(logprobs.COLUMNS, len(weight))))
    found = []
    for rows, own in zip(hidden.split(at_once), labels.split(at_once), strict=True):

        def logits(a: int, b: int, rows: Tensor = rows) -> Tensor:
            return products.linear(rows, weight[a:b]).float().div_(temperature)

        found.append(logprobs.share_of(logits, len(weight), own))
    top, sums = (torch.cat(parts, -1) for parts in zip(*found, strict=True))
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

    hidden [n, H] in the model's dtype, the same on every rank of `group` (its gradient is this rank's partial sum:
    enter through a mapping that adds it up); weight [v, H], this rank's rows of the vocabulary; labels [n, L] int64.
    Returns ([n, L] fp32; [n] fp32), the same on every rank; both carry the gradient, and an entropy that is not used
    costs nothing in backward. The matrix product rounds logits to the model's dtype; everything after it is fp32.

    Logits exist for a block of the vocabulary at a time, with all their temporaries at most `memory` bytes (or one
    column of them; `exact`: a fixed number of columns and at least 16 rows). Beside these, the gradients of hidden (in
    fp32 too) and weight, and [n] numbers, nothing is made.

    exact: the bits that `quant.exact.logprobs` defines, which are the embedded engine's; backward is the same.
    """
    picked, entropy = _LabelLogprobs.apply(hidden, weight, labels, temperature, memory, group, exact)
    return picked, entropy

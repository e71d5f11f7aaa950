"""Log-probabilities whose sums over the vocabulary are taken in blocks of fixed size, in a fixed order.

torch splits the sum of one long row over threads, and a trainer shards the vocabulary over its ranks. Here a shard is
summed in blocks of `COLUMNS`, relative to the greatest logit so far, and the shards are added from first to last.
Forward only.

Letters: T rows, L labels per row, V vocabulary, v = V / P columns of one of P shards, c of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quant.exact.products import in_rank_order

COLUMNS = 4096
Logits = Callable[[int, int], Tensor]  # (a, b) -> [T, b - a] fp32: a new tensor of columns a .. b of a shard


def shard_sums(logits: Logits, width: int, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over a shard of `width` columns. labels int64 [T, L]: columns counted from the shard's first; a label
    outside of the shard belongs to another one.

    Returns the greatest logit m fp32 [T], and fp32 [2 + L, T]: sum of e^(l - m), sum of e^(l - m) (l - m), and each
    label's logit (0 where another shard has it).
    """
    top = torch.full(labels.shape[:1], -torch.inf)
    sums = torch.zeros(2 + labels.shape[1], len(labels))
    for a in range(0, width, COLUMNS):
        block = logits(a, min(a + COLUMNS, width))
        here = (labels >= a) & (labels < a + block.shape[1])
        label = (labels - a).clamp(0, block.shape[1] - 1)
        sums[2:] += torch.where(here, block.gather(1, label), 0.0).t()
        higher = torch.maximum(top, block.amax(1))
        rescale(sums, top - higher)
        top = higher
        exps = block.sub_(top[:, None]).exp()
        sums[0] += exps.sum(1)
        sums[1] += exps.mul_(block.clamp_(min=-1e30)).sum(1)  # 0 where a logit is -inf
    return top, sums


def joined(tops: Sequence[Tensor], sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Combines the results (m [T], sums [2 + L, T]) of `shard_sums` for all shards, from first to last, into the result
    for the whole vocabulary."""
    top = torch.stack(list(tops)).amax(0)
    below = [s.clone() for s in sums]
    for s, own in zip(below, tops, strict=True):
        rescale(s, own - top)
    return top, in_rank_order(below)


def log_sum(top: Tensor, sums: Tensor) -> Tensor:
    """log of the sum of e^l, fp32 [T], from a result of `shard_sums` or `joined`. The log-probability of the first
    label is sums[2] minus this value."""
    return top + sums[0].log()


def logprob(logits: Tensor, target: Tensor, shards: int = 1) -> Tensor:
    """logits [T, V] of any float dtype, target int64 [T] -> natural log-probabilities fp32 [T], summed in `shards`."""
    width = logits.shape[1] // shards
    found = [shard_sums(_columns(logits, s), width, (target - s)[:, None]) for s in range(0, logits.shape[1], width)]
    top, sums = joined(*zip(*found, strict=True)) if shards > 1 else found[0]
    return sums[2] - log_sum(top, sums)


def _columns(logits: Tensor, start: int) -> Callable[[int, int], Tensor]:
    """Copies of columns a to b of the shard that begins at column `start`, in fp32."""
    return lambda a, b: logits[:, start + a : start + b].float().clone()


def rescale(sums: Tensor, gap: Tensor) -> None:
    """Rescales the sums of `shard_sums` in place from one maximum to a higher one. gap [T] = old maximum - new, -inf
    for none yet."""
    z, weighted = sums[0], sums[1]
    factor = gap.exp()
    # Sum of e^(l - new) (l - new) = e^gap (sum of e^(l - old) (l - old) + gap * sum of e^(l - old))
    weighted.addcmul_(gap.clamp(min=-1e30), z).mul_(factor)
    z.mul_(factor)

"""The router: the experts of each token, and their gate weights.

Equal scores are ordered by the lower id, and gate weights are added in the order of ids, so neither depends on how a
choice was made or recorded: a replayed choice gives the gate weights of a new one. Only the forward pass is specified.

Letters: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from quant.exact.rows import sigmoid

Score = Literal["sigmoid", "softmax"]


def scores(logits: Tensor, score: Score) -> Tensor:
    """fp32 [T, E] -> fp32 [T, E]; a softmax is over all experts."""
    if score == "sigmoid":
        return sigmoid(logits)
    top = torch.exp(logits - logits.detach().amax(-1, keepdim=True))
    return top / top.sum(-1, keepdim=True)


def choose(by: Tensor, k: int, *, groups: int = 1, group_topk: int = 1) -> Tensor:
    """by [T, E] -> ids int64 [T, K], best first, of the best `group_topk` groups. The score of a group is the sum of
    its two best experts.

    Source: DeepSeek-V3 report (arXiv 2412.19437), section 2.1.2.
    """
    if groups > 1 and group_topk < groups:
        by_group = by.view(len(by), groups, -1)
        best = by_group.topk(2, -1).values
        opened = _best(best[..., 0] + best[..., 1], group_topk)
        closed = torch.ones(len(by), groups, dtype=torch.bool).scatter_(1, opened, False)
        by = by_group.masked_fill(closed[..., None], -torch.inf).view(by.shape)
    return _best(by, k)


def gates(scored: Tensor, ids: Tensor, *, scale: float = 1.0, renormalize: bool = True) -> Tensor:
    """scored [T, E]: result of `scores`; ids [T, K] in any order -> fp32 [T, K], in the order of ids."""
    picked = scored.gather(1, ids)
    if renormalize:
        total = torch.zeros_like(picked[:, :1])
        for column in torch.split(scored.gather(1, ids.sort(-1).values), 1, -1):
            total = total + column
        picked = picked / (total + 1e-20)
    return picked * scale


def _best(x: Tensor, k: int) -> Tensor:
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :k]

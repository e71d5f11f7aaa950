"""Causal attention whose every query's bits depend on that query and the keys before it alone.

Scores, the softmax below one maximum and sums over blocks of `KEYS` keys, counted from a sequence's first, are fp32;
blocks are added in their order, and one that a query may not see adds exactly 0. So neither the length that keys are
filled up to, nor the other queries, nor whether a prompt came at once or in pieces can be seen. Forward only.

Letters: B sequences, Q query rows of each, L keys, H query heads, Hk key heads, d and v channels of a head, R rows that
share keys, n blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.exact.products import in_rank_order

KEYS = 32
QUERIES = 8  # rows of a batched product are filled up to a multiple of it: of fewer than 6 other sums were seen


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: Tensor | None = None) -> Tensor:
    """q [B, Q, H, d], k [B, L, Hk, d], v [B, L, Hk, v] -> [B, Q, H, v] in q's dtype: query i sees keys
    0..q_start[b]+i. Query heads h H/Hk .. (h + 1) H/Hk - 1 share key head h. q_start [B]: None is 0.

    What is not seen must be finite all the same.
    """
    b, n, h, d = q.shape
    heads, share = k.shape[2], h // k.shape[2]
    real = n * share
    rows = q.view(b, n, heads, share, d).transpose(1, 2).reshape(b * heads, real, d)
    keys, values = (_filled_up(x.transpose(1, 2), KEYS).flatten(0, 1) for x in (k, v))  # [B Hk, L, .]
    length = keys.shape[1]
    scores = torch.bmm(_filled_up(rows, QUERIES), keys.transpose(1, 2))[:, :real].mul_(scale)  # [B Hk, R, L]
    last = torch.arange(n) + (torch.zeros(1, 1, dtype=torch.int64) if q_start is None else q_start[:, None])
    hidden = torch.arange(length) > last[..., None]  # [B or 1, Q, L]
    scores.view(b, heads, n, share, length).masked_fill_(hidden[:, None, :, None], -torch.inf)
    p = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    blocks = length // KEYS
    sums = in_rank_order(p.view(b * heads, real, blocks, KEYS).sum(-1).unbind(-1))  # [B Hk, R]
    laid = _filled_up(p.view(b * heads, real, blocks, KEYS).transpose(1, 2), QUERIES).flatten(0, 1)
    parts = torch.bmm(laid, values.view(b * heads * blocks, KEYS, -1))[:, :real]
    out = in_rank_order(parts.view(b * heads, blocks, real, -1).unbind(1)) / sums[..., None]
    return out.view(b, heads, n, share, -1).transpose(1, 2).reshape(b, n, h, -1).to(q.dtype)


def _filled_up(x: Tensor, multiple: int) -> Tensor:
    """x [..., R, C] of any float dtype and strides -> fp32, contiguous, with rows of zeros up to a multiple of them: in
    one copy."""
    *outer, real, columns = x.shape
    out = torch.empty(*outer, real + -real % multiple, columns, dtype=torch.float32)
    out[..., :real, :] = x
    out[..., real:, :] = 0.0
    return out

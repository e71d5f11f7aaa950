"""Causal attention in which the bits of a query's result depend on that query and the keys before it alone.

Scores, the softmax with one maximum, and the sums over blocks of `KEYS` keys, counted from the first of a sequence, are
fp32. Blocks are added in order, and a masked block adds exactly 0. The result therefore does not depend on the padding
of keys, on other queries, or on whether a prompt was fed at once or in pieces. Forward only.

Letters: B sequences, Q query rows of each, L keys, H query heads, Hk key heads, d and v channels of a head, R rows that
share keys, n blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.exact.products import in_rank_order

KEYS = 32
QUERIES = 8  # rows of a batched product are padded to a multiple of it: below 6 rows other sums were observed


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: Tensor | None = None) -> Tensor:
    """q [B, Q, H, d], k [B, L, Hk, d], v [B, L, Hk, v] -> [B, Q, H, v] in q's dtype: query i attends to keys
    0..q_start[b]+i. Query heads h H/Hk .. (h + 1) H/Hk - 1 share key head h. q_start [B]: None is 0.

    Masked keys and values must be finite too.
    """
    b, n, h, d = q.shape
    heads, share = k.shape[2], h // k.shape[2]
    real = n * share
    rows = q.view(b, n, heads, share, d).transpose(1, 2).reshape(b * heads, real, d)
    keys, values = (_padded(x.transpose(1, 2), KEYS).flatten(0, 1) for x in (k, v))  # [B Hk, L, .]
    length = keys.shape[1]
    scores = torch.bmm(_padded(rows, QUERIES), keys.transpose(1, 2))[:, :real].mul_(scale)  # [B Hk, R, L]
    last = torch.arange(n) + (torch.zeros(1, 1, dtype=torch.int64) if q_start is None else q_start[:, None])
    hidden = torch.arange(length) > last[..., None]  # [B or 1, Q, L]
    scores.view(b, heads, n, share, length).masked_fill_(hidden[:, None, :, None], -torch.inf)
    p = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    blocks = length // KEYS
    sums = in_rank_order(p.view(b * heads, real, blocks, KEYS).sum(-1).unbind(-1))  # [B Hk, R]
    weights = _padded(p.view(b * heads, real, blocks, KEYS).transpose(1, 2), QUERIES).flatten(0, 1)
    by_block = torch.bmm(weights, values.view(b * heads * blocks, KEYS, -1))[:, :real]
    out = in_rank_order(by_block.view(b * heads, blocks, real, -1).unbind(1)) / sums[..., None]
    return out.view(b, heads, n, share, -1).transpose(1, 2).reshape(b, n, h, -1).to(q.dtype)


def _padded(x: Tensor, multiple: int) -> Tensor:
    """x [..., R, C] of any float dtype and strides -> fp32, contiguous, with rows of zeros up to a multiple of rows, in
    one copy."""
    *outer, real, columns = x.shape
    out = torch.empty(*outer, real + -real % multiple, columns, dtype=torch.float32)
    out[..., :real, :] = x
    out[..., real:, :] = 0.0
    return out

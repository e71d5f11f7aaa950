"""The fast operations: stock torch kernels. See `operations.Operations` for shapes.

The last bits of a row may depend on the number of rows in a call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.embedded.families.architecture import RouterSpec

absorb = True
wide = False
tp_shards = 1
expert_tp_shards = 1
_ROW_BYTES = 16
_grouped_mm = getattr(F, "grouped_mm", torch._grouped_mm)


def linear(x: Tensor, w: Tensor, shards: int = 1) -> Tensor:
    if shards == 1:
        return F.linear(x, w)
    pairs = zip(x.chunk(shards, -1), w.chunk(shards, -1), strict=True)
    total = torch.stack([F.linear(a.float(), b.float()) for a, b in pairs]).sum(0)
    return total.to(x.dtype)


def grouped_linear(x: Tensor, w: Tensor, counts: Sequence[int], shards: int = 1) -> Tensor:
    if shards != 1:
        raise ValueError(f"the plain operations support experts in one shard, not in {shards}")
    if not (_aligned(x) and _aligned(w)):
        each = zip(torch.split(x, list(counts)), w, strict=True)
        return torch.cat([F.linear(rows, weight) for rows, weight in each])
    return by_ends(x, w, torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32))


def by_ends(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """x [T, in] sorted by expert, w [E, out, in], ends int32 [E] the row after the last of each -> [T, out]. Rows begin
    at multiples of 16 bytes."""
    return _grouped_mm(x, w.transpose(1, 2), offs=ends)


def _aligned(t: Tensor) -> bool:
    """Whether torch's grouped product accepts `t`: rows must begin at multiples of 16 bytes."""
    return t.shape[-1] * t.element_size() % _ROW_BYTES == 0


def rmsnorm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, eps)


def rope_cos_sin(pos: Tensor, inv_freq: Tensor, mscale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each row's angles, [T, d/2] each: both halves of a rotated head share them."""
    angle = pos.float()[:, None] * inv_freq
    return (angle.cos() * mscale).to(dtype), (angle.sin() * mscale).to(dtype)


def rope(t: Tensor, cos: Tensor, sin: Tensor, deinterleave: bool = False) -> Tensor:
    a, b = (t[..., 0::2], t[..., 1::2]) if deinterleave else t.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: Tensor) -> Tensor:
    """Scores and softmax are fp32. The query heads of a key head are rows of one product."""
    b, n, h, d = q.shape
    length, heads = k.shape[1], k.shape[2]
    rows = q.view(b, n, heads, -1, d).transpose(1, 2).reshape(b * heads, -1, d)  # [B Hk, Q H/Hk, d]
    keys, values = (t.transpose(1, 2).reshape(b * heads, length, -1) for t in (k, v))  # copies whole rows, or nothing
    scores = torch.bmm(rows, keys.transpose(1, 2)).float().mul_(scale)
    if q.is_cuda or n > 1 or int(q_start.min()) < length - 1:  # on a device the number would be waited for
        last = q_start[:, None] + torch.arange(n, device=q.device)
        hidden = torch.arange(length, device=q.device) > last[..., None]  # [B, Q, L]
        scores.view(b, heads, n, -1, length).masked_fill_(hidden[:, None, :, None], float("-inf"))
    out = torch.bmm(torch.softmax(scores, -1).to(q.dtype), values)
    return out.view(b, heads, n, h // heads, -1).transpose(1, 2).reshape(b, n, h, -1)


def route(x: Tensor, gate_w: Tensor, bias: Tensor | None, router: RouterSpec) -> tuple[Tensor, Tensor]:
    """The bias and the group limit act on the choice only; the gate weights are unbiased scores.

    Source: DeepSeek-V3 report (arXiv 2412.19437) section 2.1.2; a group is scored by the sum of its two best experts.
    A softmax is over all experts.
    """
    logits, groups = F.linear(x.float(), gate_w), router.groups
    scores = logits.sigmoid() if router.score == "sigmoid" else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if groups > 1 and router.group_topk < groups:
        by_group = choice.view(len(x), groups, -1)
        best = by_group.topk(2, -1).values.sum(-1).topk(router.group_topk, -1, sorted=False).indices
        closed = torch.ones(len(x), groups, 1, dtype=torch.bool, device=x.device).scatter_(1, best[..., None], False)
        choice = by_group.masked_fill(closed, float("-inf")).view(len(x), -1)
    ids = choice.topk(router.top_k, -1).indices
    weights = scores.gather(1, ids)
    if router.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * router.scale


def swiglu(y: Tensor, w: Tensor | None = None) -> Tensor:
    """Reuses the memory of intermediate results: half of the time of this operation is memory traffic."""
    gate, up = y.chunk(2, -1)
    out = F.silu(gate).mul_(up)
    return out if w is None else out.mul_(w)


def combine(y: Tensor, token: Tensor, n: int) -> Tensor:
    return torch.zeros(n, y.shape[1], dtype=torch.float32).index_add_(0, token, y.float()).to(y.dtype)


def logprob(logits: Tensor, target: Tensor, shards: int = 1) -> Tensor:
    if shards != 1:
        raise ValueError(f"the plain operations support the vocabulary in one shard, not in {shards}")
    return torch.log_softmax(logits.float(), -1).gather(-1, target[:, None])[:, 0]

"""Fused attention of TransformerEngine's extension in PyTorch, over packed sequences ("thd").

Letters: T packed tokens, h query heads, g key and value heads, d query and key size, v value size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

F16_ARBITRARY_SEQLEN = 1


def get_fused_attn_backend(params: Any) -> tuple[int, str]:
    """cuDNN's kernel for arbitrary lengths, whatever is asked."""
    return F16_ARBITRARY_SEQLEN, ""


def _sequences(
    cu_q: Tensor, cu_kv: Tensor, padded_q: Tensor | None, padded_kv: Tensor | None
) -> Iterator[tuple[slice, slice]]:
    """Rows of each sequence's queries and keys."""
    starts = (cu_q if padded_q is None else padded_q).tolist(), (cu_kv if padded_kv is None else padded_kv).tolist()
    lengths = cu_q.diff().tolist(), cu_kv.diff().tolist()
    for i in range(len(lengths[0])):
        q, kv = starts[0][i], starts[1][i]
        yield slice(q, q + lengths[0][i]), slice(kv, kv + lengths[1][i])


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """[h, n, m] fp32, -inf above the diagonal; k has its heads repeated."""
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _wide(x: Tensor, heads: int) -> Tensor:
    """FP32, with each head repeated for the query heads that read it."""
    return x.float().repeat_interleave(heads // x.shape[1], dim=1)


def fused_attn_fwd(*args: Any) -> list[Tensor]:
    """[output [T, h, v], log of the sums of exponentials [T, h, 1] fp32, state of the random numbers]."""
    scale, dropout, mask, softmax, window = args[3], args[4], args[10], args[11], args[12]
    cu_q, cu_kv, q, k, v = args[14:19]
    padded_q, padded_kv = args[20:22]
    _check(args[6], dropout, softmax, window)
    heads = q.shape[1]
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    stats = torch.zeros(*q.shape[:2], 1)
    for at, of in _sequences(cu_q, cu_kv, padded_q, padded_kv):
        scores = _scores(q[at].float(), _wide(k[of], heads), scale, _causal(mask))
        out[at] = torch.einsum("hnm,mhv->nhv", scores.softmax(-1), _wide(v[of], heads)).to(q.dtype)
        stats[at] = scores.logsumexp(-1).t()[..., None]
    return [out, stats, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(*args: Any) -> list[Tensor | None]:
    """[gradients of q, k, v, None, None]."""
    scale, dropout, mask, softmax, window = args[2], args[3], args[12], args[13], args[14]
    cu_q, cu_kv, q, k, v, o, grad = args[17:24]
    (stats, *_), padded_q, padded_kv = args[25:28]
    _check(args[5], dropout, softmax, window)
    heads, groups = q.shape[1], k.shape[1]
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for at, of in _sequences(cu_q, cu_kv, padded_q, padded_kv):
        wide_q, wide_k, wide_v = q[at].float(), _wide(k[of], heads), _wide(v[of], heads)
        p = torch.exp(_scores(wide_q, wide_k, scale, _causal(mask)) - stats[at].permute(1, 0, 2))
        wide = grad[at].float()
        inner = (wide * o[at].float()).sum(-1).t()[..., None]
        ds = p * (torch.einsum("nhv,mhv->hnm", wide, wide_v) - inner) * scale
        dq[at] = torch.einsum("hnm,mhd->nhd", ds, wide_k).to(q.dtype)
        for target, whole in (
            (dk, torch.einsum("hnm,nhd->mhd", ds, wide_q)),
            (dv, torch.einsum("hnm,nhv->mhv", p, wide)),
        ):
            target[of] = whole.unflatten(1, (groups, heads // groups)).sum(2).to(target.dtype)
    return [dq, dk, dv, None, None]


def convert_thd_to_bshd(packed: Tensor, cu_seqlens: Tensor, batch: int, longest: int) -> Tensor:
    """[T, h, d] -> [batch, longest, h, d], zeros behind each sequence."""
    out = packed.new_zeros(batch, longest, *packed.shape[1:])
    for i, part in enumerate(packed.split(cu_seqlens.diff().tolist())):
        out[i, : len(part)] = part
    return out


def convert_bshd_to_thd(padded: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """The reverse, [tokens, h, d]."""
    return torch.cat([padded[i, :n] for i, n in enumerate(cu_seqlens.diff().tolist())])


_CODES: dict[str, Any] = {}


def use_codes(extension: Any) -> None:
    """The extension's enumerations, by which the calls name layouts and masks."""
    _CODES["thd"] = extension.NVTE_QKV_Layout.NVTE_THD_THD_THD
    _CODES["causal"] = extension.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK
    _CODES["open"] = extension.NVTE_Mask_Type.NVTE_PADDING_MASK
    _CODES["vanilla"] = extension.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX


def _causal(mask: Any) -> bool:
    assert mask in (_CODES["causal"], _CODES["open"]), f"mask {mask} is not emulated"
    return bool(mask == _CODES["causal"])


def _check(layout: Any, dropout: float, softmax: Any, window: Any) -> None:
    assert layout == _CODES["thd"], "only packed sequences are emulated"
    assert not dropout and softmax == _CODES["vanilla"], "neither dropout nor other softmaxes are emulated"
    assert tuple(window) in ((-1, -1), (-1, 0)), f"window {window} is not emulated"


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "get_fused_attn_backend": get_fused_attn_backend,
    "fused_attn_fwd": fused_attn_fwd,
    "fused_attn_bwd": fused_attn_bwd,
    "convert_thd_to_bshd": convert_thd_to_bshd,
    "convert_bshd_to_thd": convert_bshd_to_thd,
}

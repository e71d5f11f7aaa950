"""Modules that megatron-core's spec without TransformerEngine lacks, and `localize`, which inserts them into a spec.

Letters: T packed tokens, N segments (samples) in a pack, h heads on this rank, d query/key and v value size of a head,
cp context-parallel ranks, n runs of queries in a group, Q and K their padded number of queries and keys.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import megatron.core.transformer.multi_latent_attention as mla
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_bridge.model.grouped_experts import LocalGroupedMLP
from megatron_bridge.model.kernels import varlen_attention
from megatron_bridge.model.kernels.chosen import by_triton, note
from megatron_bridge.model.packed_rope import apply_packed_rope, ends_of
from megatron_bridge.model.permutation import sort_on_devices
from megatron_bridge.model.router import MaskedRouter
from routing_replay.align import zigzag_index
from routing_replay.checksums import ragged_arange

sort_on_devices()  # before a rank on fake tensors replaces these functions for a while

_SEPARATE_CALL = 1024  # from this length on, padding to a similar length costs more than a separate call
_WIDEST_NORM = 8192  # elements of a row that a program of the Triton kernel holds
_SHORT = 16  # up to this length plain matrix products are faster than the CPU's attention kernel


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """A batch of runs of queries of similar length, with the keys that they may attend.

    A padding slot holds row 0: as a query its output is not read, as a key only padding queries attend it.
    """

    queries: Tensor  # [n, Q] int64: rows of this rank
    keys: Tensor  # [n, K] int64: rows of all context-parallel ranks, concatenated
    ahead: Tensor | None  # [n] int64: keys before a run's first query; None where there are none, so that Q == K
    filled: Tensor  # int64: slots of the flattened `queries` that hold a row rather than padding


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    groups: tuple[_Group, ...]
    inverse: Tensor  # [T / cp] int64: row t of this rank is row inverse[t] of all groups' query slots
    in_order: bool  # each group's rows directly follow the previous group's, as in a pack sorted by length


def _size_class(length: int) -> int:
    """Segments of one class share a call: powers of two; 0 for a segment with a call to itself."""
    return 0 if length >= _SEPARATE_CALL else max(4, (length - 1).bit_length())


def _side_by_side(rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """`rows`, concatenated runs of `lengths` [n] -> ([n, longest] padded with 0, flat slot of each row in it)."""
    longest = int(lengths.max())
    slots = ragged_arange(torch.arange(len(lengths)) * longest, lengths)
    out = rows.new_zeros(len(lengths) * longest)
    out[slots] = rows
    return out.view(-1, longest), slots


@functools.lru_cache(maxsize=64)
def _planned(cu_seqlens: tuple[int, ...], rank: int, size: int, device: torch.device) -> _Plan:
    """Group a pack's segments by length.

    A rank's queries of a segment are one run (size 1), or two, its zigzag chunks. Their keys start at the segment's
    start.
    """
    cu = torch.tensor(cu_seqlens)
    gathered = torch.empty(cu_seqlens[-1], dtype=torch.int64)  # row of the pack -> row of all ranks, concatenated
    all_ranks = torch.cat([zigzag_index(cu, r, size) for r in range(size)]) if size > 1 else torch.arange(len(gathered))
    gathered[all_ranks] = torch.arange(len(gathered))
    chunks = (rank, 2 * size - 1 - rank) if size > 1 else (0,)
    buckets: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)  # (segment's start, run's, its end)
    for i, (a, b) in enumerate(itertools.pairwise(cu_seqlens)):
        chunk = (b - a) // (2 * size) if size > 1 else b - a
        for c in chunks if chunk else ():
            buckets[c, _size_class(b - a) or -i].append((a, a + c * chunk, a + (c + 1) * chunk))
    groups: list[_Group] = []
    inverse = torch.empty(cu_seqlens[-1] // size, dtype=torch.int64)
    first, base = rank * len(inverse), 0  # this rank's first row among the rows of all ranks
    for (chunk_number, _), runs in buckets.items():
        start, begin, end = torch.tensor(runs).T
        queries, slots = _side_by_side(gathered[ragged_arange(begin, end - begin)] - first, end - begin)
        inverse[queries.flatten()[slots]] = base + slots
        base += queries.numel()
        keys, _ = _side_by_side(gathered[ragged_arange(start, end - start)], end - start)
        ahead = (begin - start).to(device) if chunk_number else None
        groups.append(_Group(queries.to(device), keys.to(device), ahead, slots.to(device)))
    in_order = size == 1 and bool((inverse.diff() > 0).all())
    return _Plan(tuple(groups), inverse.to(device), in_order)


@functools.lru_cache(maxsize=16)
def _causal_blocks(length: int, side_by_side: int) -> Tensor:
    """[1, L, L] with L = side_by_side * length: 0 where a query may attend, -inf elsewhere."""
    whole = torch.block_diag(*[torch.ones(length, length)] * side_by_side).tril()
    return torch.where(whole.bool(), 0.0, -torch.inf)[None]


def _short_causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q, k [n, h, Q, d] and v [n, h, Q, v] of runs of at most _SHORT -> [n, Q, h, v].

    The CPU kernel's overhead per run and head exceeds the arithmetic of such a run. Plain batched products take 0.4 of
    its time at 8 tokens and 0.75 at 16; for longer runs the kernel is as fast.
    """
    n, h, length, _ = q.shape
    together = next(m for m in (4, 2, 1) if n % m == 0 and m * length <= max(_SHORT, length))

    def batched(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(n // together, together * length, h, -1).transpose(1, 2).flatten(0, 1)

    scores = torch.baddbmm(_causal_blocks(length, together), batched(q), batched(k).transpose(1, 2), alpha=scale)
    out = torch.bmm(scores.softmax(-1), batched(v))  # [n / m * h, m Q, v]
    return out.view(n // together, h, together * length, -1).transpose(1, 2).reshape(n, length, h, -1)


def padded_causal_attention(q: Tensor, k: Tensor, v: Tensor, ahead: Tensor | None, scale: float) -> Tensor:
    """softmax(q k^T * scale) v of a batch of runs: q [n, Q, h, d], k [n, K, h, d], v [n, K, h, v] -> [n, Q, h, v].

    ahead [n]: keys before a run's first query; None where there are none, so that Q == K.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if ahead is None and q.shape[2] <= _SHORT and q.device.type == "cpu":
        return _short_causal_attention(q, k, v, scale)
    mask = None
    if ahead is not None:
        last = ahead[:, None] + torch.arange(q.shape[2], device=q.device)  # [n, Q]: each query's last key
        mask = (torch.arange(k.shape[2], device=q.device) <= last[..., None])[:, None]  # [n, 1, Q, K]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return o.transpose(1, 2)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]  # as `padded_causal_attention`


def packed_causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    *,
    rank: int = 0,
    size: int = 1,
    attend: Attend = padded_causal_attention,
) -> Tensor:
    """softmax(q k^T * scale) v, causal within each segment.

    query [T / size, h, d] of this context-parallel rank; key [T, h, d] and value [T, h, v] of all ranks, concatenated,
    each in zigzag order; cu_seqlens [N+1] int, of the whole pack. Returns [T / size, h, v]. Many short segments share
    one call: no real query attends a padding key, since padding comes last and attention is causal.
    """
    plan = _planned(ends_of(cu_seqlens), rank, size, query.device)
    dtype = value.dtype
    if query.device.type == "cpu":
        # The CPU kernel's bf16 backward takes 16 times as long as fp32 on segments of a dozen tokens.
        query, key, value = query.float(), key.float(), value.float()
    if plan.in_order:
        return _in_order(plan.groups, query, key, value, scale, attend).to(dtype)
    outs = []
    for g in plan.groups:
        q, k, v = (
            x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:])
            for x, rows in ((query, g.queries), (key, g.keys), (value, g.keys))
        )  # [n, Q or K, h, d or v]
        outs.append(attend(q, k, v, g.ahead, scale).flatten(0, 1))
    return torch.cat(outs).index_select(0, plan.inverse).to(dtype)


def _in_order(
    groups: Sequence[_Group], query: Tensor, key: Tensor, value: Tensor, scale: float, attend: Attend
) -> Tensor:
    """Attention over groups that are contiguous slices of the pack: slicing concatenates the gradients, where
    index_select would sum a gradient of the whole pack once per group. Only a group with padding slots needs it."""
    counts, outs = [len(g.filled) for g in groups], []
    for g, *rows in zip(groups, *(x.split(counts) for x in (query, key, value)), strict=True):
        gaps = g.queries.numel() > len(g.filled)
        if gaps:
            slots = (g.queries.flatten() - g.queries[0, 0]).clamp(min=0)
            rows = [x.index_select(0, slots) for x in rows]
        q, k, v = (x.view(*g.queries.shape, *x.shape[1:]) for x in rows)
        out = attend(q, k, v, None, scale).flatten(0, 1)
        outs.append(out.index_select(0, g.filled) if gaps else out)
    return torch.cat(outs) if len(outs) > 1 else outs[0]


class SDPACoreAttention(MegatronModule):
    """Core attention by torch's scaled_dot_product_attention over packed segments.

    The stock DotProductAttention rejects `k_channels` and `v_channels`, so MLA cannot be built without
    TransformerEngine, and it does not support packed sequences.
    """

    attend: Attend = staticmethod(padded_causal_attention)

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,  # [T / cp, h, d]
        key: Tensor,  # [T / cp, groups, d]
        value: Tensor,  # [T / cp, groups, v]
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[T / cp, h * v]. Keys and values are gathered over context-parallel ranks; backward sums their gradients."""
        assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd", (
            "only packed batches are supported"
        )
        assert attention_mask is None and attention_bias is None
        group, cu_seqlens = self.cp_group, packed_seq_params.cu_seqlens_q_padded
        plain = group.size() > 1 or self.attend is not padded_causal_attention
        if note("attention", query, not plain and varlen_attention.supports(query, value)):
            longest = packed_seq_params.max_seqlen_q
            return varlen_attention.varlen_attention(query, key, value, cu_seqlens, longest, self.scale).flatten(1)
        key, value = (gather_from_sequence_parallel_region(x, group=group) for x in (key, value))
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        out = packed_causal_attention(
            query, key, value, cu_seqlens, self.scale, rank=group.rank(), size=group.size(), attend=self.attend
        )
        return out.flatten(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return {}


class _RMSNorm(torch.autograd.Function):
    """torch's fused forward with a closed-form gradient; torch differentiates a dozen operations one by one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor
        out, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)  # what F.rms_norm calls
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide, g, w = x.to(dtype).flatten(0, -2), grad.to(dtype).flatten(0, -2), weight.to(dtype)
        scale = scale.to(dtype).flatten(0, -2)
        g = g * scale
        product = wide * g
        of_weight = product.sum(0)
        along = product.mul_(w).sum(-1, keepdim=True).mul_(scale.square()).div_(len(w))
        of_x = g.mul_(w).addcmul_(wide, along, value=-1)
        return of_x.to(x.dtype).view_as(x), of_weight.to(weight.dtype), None


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """An RMSNorm that works under sequence parallelism; the stock WrappedTorchNorm asserts `not sequence_parallel`.

    A rank's gradient covers only its own tokens. The weight's `sequence_parallel` attribute makes megatron sum it over
    tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _norm_for(x).apply(x, self.weight, self.eps)
        return out


def _norm_for(x: Tensor) -> type[torch.autograd.Function]:
    """The autograd function of an RMSNorm over x's last dimension."""
    if x.shape[-1] > _WIDEST_NORM or not by_triton("norms", x):
        return _RMSNorm
    from megatron_bridge.model.kernels.rms_norm import FusedRMSNorm

    return FusedRMSNorm


class DuplicatedLinear(torch.nn.Linear):
    """A linear replicated on each tensor-parallel rank: TELinear(parallel_mode="duplicated") without that library.

    The stock local spec gathers the rotary part of MLA's key in forward but only splits in backward, so its gradient
    lacks the other ranks' share: an error of 0.7 of the gradient in a tiny model of two ranks.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Any, bias: bool = False, **kwargs: Any
    ) -> None:
        assert not bias
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        if config.perform_initialization:
            init_method(self.weight)
        self.sequence_parallel = config.sequence_parallel
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # as megatron's linears
        return F.linear(x, self.weight, self.bias), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, None, sharded_offsets)  # type: ignore[no-any-return]


_LOCAL_MODULES = {
    DotProductAttention: SDPACoreAttention,
    WrappedTorchNorm: SequenceParallelRMSNorm,
    SequentialMLP: LocalGroupedMLP,
}
_EVERY_SPEC = {TopKRouter: MaskedRouter}  # replaced in TransformerEngine's specs too
_DUPLICATED = ("linear_q_down_proj", "linear_kv_down_proj")


def localize(spec: Any, *, te: bool = False, replacements: Mapping[type, type] | None = None) -> Any:
    """A copy of a stock spec (layer or block) with the modules above in place of unsuitable ones; in a
    TransformerEngine spec (`te`) only the router is replaced. `replacements` are applied to the resulting modules."""
    modules, replacements = _EVERY_SPEC if te else _EVERY_SPEC | _LOCAL_MODULES, replacements or {}
    if not te:
        assert hasattr(mla, "Linear"), "MLASelfAttention no longer compares its down projections with `Linear`"
        rope_utils._apply_rotary_pos_emb_thd = apply_packed_rope
        # MLASelfAttention compares classes by identity; this one has Linear's signature
        mla.Linear = replacements.get(DuplicatedLinear, DuplicatedLinear)
    spec = copy.deepcopy(spec)

    def swap(name: str, value: Any) -> Any:
        if isinstance(value, type):
            if not te and name in _DUPLICATED and value is ColumnParallelLinear:
                value = DuplicatedLinear
            value = modules.get(value, value)
            return replacements.get(value, value)
        walk(value)
        return value

    def walk(node: Any) -> None:
        if isinstance(node, ModuleSpec) or (dataclasses.is_dataclass(node) and not isinstance(node, type)):
            for f in dataclasses.fields(node):
                setattr(node, f.name, swap(f.name, getattr(node, f.name)))
        elif isinstance(node, list):
            for i, item in enumerate(node):
                node[i] = swap("", item)

    walk(spec)
    return spec

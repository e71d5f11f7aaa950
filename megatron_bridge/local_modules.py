"""Modules that megatron-core's spec without TransformerEngine lacks, and `localize`, which puts them into one.

Letters: T packed tokens, N segments (samples) in a pack, h heads on this rank, d query/key and v value size of a head,
S padded length of a group of segments.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections import defaultdict
from typing import Any

import megatron.core.transformer.multi_latent_attention as mla
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

_ALONE = 1024  # from this length on, padding to a neighbour's length costs more than a call of its own


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Segments of similar length, laid side by side: row t of the pack goes to padded[slot[t]]."""

    count: int  # n segments
    length: int  # S
    rows: Tensor  # [tokens of the group] int64: positions in the pack
    slots: Tensor  # [tokens of the group] int64: positions in the flattened [n * S]


@functools.lru_cache(maxsize=64)
def _groups(cu_seqlens: tuple[int, ...], device: torch.device) -> tuple[tuple[_Group, ...], Tensor]:
    """Groups by length (powers of two), and the inverse: row t of the pack is row inverse[t] of all groups' slots."""
    buckets: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for i, (a, b) in enumerate(itertools.pairwise(cu_seqlens)):
        if b > a:
            buckets[-i if b - a >= _ALONE else max(4, (b - a - 1).bit_length())].append((a, b))
    groups: list[_Group] = []
    inverse = torch.empty(cu_seqlens[-1], dtype=torch.int64)
    base = 0
    for segments in buckets.values():
        size = max(b - a for a, b in segments)
        rows = torch.cat([torch.arange(a, b) for a, b in segments])
        slots = torch.cat([torch.arange(i * size, i * size + b - a) for i, (a, b) in enumerate(segments)])
        inverse[rows] = base + slots
        base += len(segments) * size
        groups.append(_Group(len(segments), size, rows.to(device), slots.to(device)))
    return tuple(groups), inverse.to(device)


def packed_causal_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale) v, causal within each segment.

    query, key [T, h, d]; value [T, h, v]; cu_seqlens [N+1] int. Returns [T, h, v]. Many short segments share one
    call: a padded row is never attended by a real one, since padding follows its segment and attention is causal.
    """
    groups, inverse = _groups(tuple(cu_seqlens.tolist()), query.device)
    dtype, outs = value.dtype, []
    if query.device.type == "cpu":
        # The CPU kernel's bf16 backward takes 16 times as long as fp32 on segments of a dozen tokens.
        query, key, value = query.float(), key.float(), value.float()
    for g in groups:
        q, k, v = (
            x.new_zeros(g.count * g.length, *x.shape[1:])
            .index_copy(0, g.slots, x.index_select(0, g.rows) if len(groups) > 1 else x)
            .view(g.count, g.length, *x.shape[1:])
            .transpose(1, 2)
            for x in (query, key, value)
        )  # [n, h, S, d or v]
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        outs.append(o.transpose(1, 2).reshape(g.count * g.length, *value.shape[1:]))
    return (torch.cat(outs) if len(outs) > 1 else outs[0]).index_select(0, inverse).to(dtype)


class SDPACoreAttention(MegatronModule):
    """Core attention by torch's scaled_dot_product_attention over packed segments.

    The stock DotProductAttention rejects `k_channels` and `v_channels`, so that MLA cannot even be built without
    TransformerEngine, and has no packed layout.
    """

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

    def forward(
        self,
        query: Tensor,  # [T, h, d]
        key: Tensor,  # [T, groups, d]
        value: Tensor,  # [T, groups, v]
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[T, h * v]."""
        assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd", "only packed batches are fed"
        assert attention_mask is None and attention_bias is None
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        return packed_causal_attention(query, key, value, packed_seq_params.cu_seqlens_q, self.scale).flatten(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return {}


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """The stock WrappedTorchNorm asserts `not sequence_parallel`. Its gradient is a sum over this rank's tokens only,
    which `sequence_parallel` on the weight asks megatron to add up over tensor-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class DuplicatedLinear(torch.nn.Linear):
    """A linear that each tensor-parallel rank holds whole: TELinear(parallel_mode="duplicated") without that library.

    With the stock local spec the rotary part of MLA's key is gathered forward and only split backward, so its gradient
    lacks the other ranks' share: 1e-2 relative in linear_kv_down_proj.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Any, bias: bool = False, **kwargs: Any
    ) -> None:
        assert not bias
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return F.linear(x, self.weight), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, None, sharded_offsets)  # type: ignore[no-any-return]


class PaddedSequentialMLP(SequentialMLP):
    """Experts one after the other, each fed a multiple of `ROWS` tokens.

    How many tokens an expert gets changes every step, and oneDNN compiles a bf16 matrix product anew for every number
    of rows: half a millisecond, several times the product itself at small sizes. Rows of zeros give zeros (there are
    no biases) and no gradient. Sixteen rows or more also keep a row's bits independent of how many there are.
    """

    ROWS = 64

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        counts = tokens_per_expert.tolist()
        out = []
        for expert, tokens, probs in zip(
            self.local_experts,
            torch.split(permuted_local_hidden_states, counts),
            torch.split(permuted_probs, counts),
            strict=True,
        ):
            n = len(tokens)
            pad = -n % self.ROWS
            y, bias = expert(F.pad(tokens, (0, 0, 0, pad)), F.pad(probs, (0, pad)))
            assert bias is None
            out.append(y[:n])
        return torch.cat(out), None


_SWAPS = {
    DotProductAttention: SDPACoreAttention,
    WrappedTorchNorm: SequenceParallelRMSNorm,
    SequentialMLP: PaddedSequentialMLP,
}
_DUPLICATED = ("linear_q_down_proj", "linear_kv_down_proj")


def localize(spec: Any) -> Any:
    """A copy of a stock local spec (layer or block) with the modules above in place of those that cannot serve."""
    assert hasattr(mla, "Linear"), "MLASelfAttention no longer compares its down projections with `Linear`"
    mla.Linear = DuplicatedLinear  # it accepts the classes it knows by identity; this one has Linear's signature
    spec = copy.deepcopy(spec)

    def swap(name: str, value: Any) -> Any:
        if isinstance(value, type):
            if name in _DUPLICATED and value is ColumnParallelLinear:
                return DuplicatedLinear
            return _SWAPS.get(value, value)
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

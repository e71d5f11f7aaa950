"""Replacements of functions whose results depend on the values of a routing map: the numbers of tokens that are sent.

The dispatchers and their permutations are megatron's; only counts are given to them. DeepEP's and HybridEP's kernels,
which no CPU machine has, are replaced by functions that allocate what those return and keep.

Letters: t rows of this rank, R expert-parallel ranks (tensor-parallel ones of experts included), E experts, L of them
on this rank, K experts per token, n rows after dispatch, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.fake.substitutes.facts import Balance, even
from megatron_bridge.fake.substitutes.substitute import Substitute
from megatron_bridge.fake.substitutes.tensors import RankMode, outside

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_counts = outside(lambda values: torch.tensor(values, dtype=torch.int64))


def routing_substitutes(mode: RankMode, balance: Balance) -> tuple[Substitute, ...]:
    """Replacements for all three dispatchers of megatron."""
    to_all, gather, deepep = (
        f"{_DISPATCHER}:{name}"
        for name in ("MoEAlltoAllTokenDispatcher", "MoEAllGatherTokenDispatcher", "_DeepepManager")
    )
    balanced = "balanced routing"
    return (
        Substitute(to_all, "preprocess", balanced, lambda _: _splits(balance)),
        Substitute(to_all, "_maybe_dtoh_and_synchronize", balanced, lambda _: lambda self, point, tokens=None: tokens),
        Substitute(gather, "dispatch_postprocess", balanced, lambda stock: _gathered(stock, mode, balance)),
        Substitute(_DISPATCHER, "permute", balanced, lambda stock: _permute(stock, mode)),
        Substitute(_DISPATCHER, "unpermute", balanced, _unfused),
        Substitute(_DISPATCHER, "sort_chunks_by_idxs", balanced, lambda _: _sorted_chunks),
        Substitute(_DISPATCHER, "fused_dispatch", "DeepEP", lambda _: _dispatch(balance)),
        Substitute(_DISPATCHER, "fused_combine", "DeepEP", lambda _: _combine),
        Substitute(_DISPATCHER, "set_deepep_num_sms", "DeepEP", lambda _: lambda n: None),
        Substitute(deepep, "_indices_to_multihot", balanced, lambda _: _multihot),
        Substitute(_DISPATCHER, "hybrid_ep_dispatch", "HybridEP", lambda _: _hybrid_dispatch(balance)),
        Substitute(_DISPATCHER, "hybrid_ep_combine", "HybridEP", lambda _: _hybrid_combine),
    )


# ---- all-to-all and all-gather


def _splits(balance: Balance) -> Callable[..., Tensor]:
    def preprocess(self: Any, routing_map: Tensor) -> Tensor:
        """[L] int64: rows of each local expert."""
        sent = routing_map.size(0) * balance.top_k
        received = balance.received(sent)
        self.num_out_tokens = sent
        ranks = self.ep_size * self.tp_size
        if ranks > 1:
            self.input_splits, self.output_splits = even(sent, self.ep_size), even(received, self.ep_size)
            self.output_splits_tp = _counts([received] * self.tp_size)
        of_experts = even(received * self.tp_size, self.num_local_experts)
        if self.num_local_experts > 1:
            self.num_global_tokens_per_local_expert = _counts([even(n, ranks) for n in of_experts]).t()
        # as the stock dispatcher's order of chunks: on a single rank they are sorted
        self.sort_input_by_local_experts = self.restore_output_by_local_experts = ranks == 1
        tokens: Tensor = _counts(of_experts)
        return tokens

    return preprocess


def _sorted_chunks(
    input: Tensor, split_sizes: Any, sorted_idxs: bool, probs: Tensor | None = None, fused: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The chunks of `input` in another order; `sorted_idxs`: they are in order already."""
    if sorted_idxs and not fused:
        return input, probs

    def reordered(x: Tensor) -> Tensor:
        first = len(x) // 2
        return torch.cat(x.split([first, len(x) - first])[::-1])

    return reordered(input), None if probs is None else reordered(probs)


def _permute(stock: Any, mode: RankMode) -> Any:
    def permute(
        tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None, num_out_tokens: Any = None, **_: Any
    ) -> Any:
        if not isinstance(num_out_tokens, int):  # known from outside, see `_gathered`
            return stock(tokens, routing_map, probs)
        with mode.true_elements(num_out_tokens):
            return stock(tokens, routing_map, probs, num_out_tokens)

    return permute


def _unfused(stock: Any) -> Any:
    def unpermute(*args: Any, fused: bool = False, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    return unpermute


def _gathered(stock: Any, mode: RankMode, balance: Balance) -> Any:
    def dispatch_postprocess(self: Any, hidden_states: Tensor, probs: Tensor) -> Any:
        rows = len(hidden_states) * balance.top_k * self.num_local_experts // balance.experts
        received = balance.received(rows)
        with mode.true_elements(received):
            tokens, _, weights = stock(self, hidden_states, probs)
        return tokens, _counts(even(received, self.num_local_experts)), weights

    return dispatch_postprocess


# ---- DeepEP


class _Dispatch(torch.autograd.Function):
    """Rows [t, H] of this rank -> the rows that it receives, each once, however many of its experts a row has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, received: int) -> tuple[Tensor, Tensor]:
        ctx.shapes = x.shape, probs.shape
        return x.new_empty(received, x.shape[1]), probs.new_empty(received, probs.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_probs: Tensor) -> tuple[Tensor, Tensor, None]:
        shape, probs = ctx.shapes
        return grad.new_empty(shape), of_probs.float().new_empty(probs), None


class _Combine(torch.autograd.Function):
    """The reverse of `_Dispatch`: sums of rows, [t, H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.shape = x.shape
        return x.new_empty(rows, x.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_empty(ctx.shape), None


def _dispatch(balance: Balance) -> Any:
    def fused_dispatch(
        x: Tensor, token_indices: Tensor, token_probs: Tensor, num_experts: int, group: Any, **_: Any
    ) -> tuple[Any, ...]:
        """(rows [n, H], ids [n, K], weights [n, K], rows of each local expert, what the reverse needs)."""
        ranks = group.size()
        slices = num_experts // balance.experts  # tensor-parallel ranks of an expert, each of which gets its tokens
        received = balance.received(round(len(x) * slices * balance.ranks_of_a_token(ranks // slices)))
        rows, probs = _Dispatch.apply(x, token_probs, received)  # type: ignore[no-untyped-call]
        ids = token_indices.new_empty(received, token_indices.shape[1])
        # DeepEP's handle: which rows go to which ranks, and where each received row came from
        handle = (
            len(x),
            x.new_empty(len(x), ranks, dtype=torch.bool),
            x.new_empty(len(x), ranks, dtype=torch.int32),
            x.new_empty(received, dtype=torch.int32),
        )
        of_experts = even(balance.received(len(x) * slices * balance.top_k), num_experts // ranks)
        return rows, ids, probs, _Counts(of_experts), handle

    return fused_dispatch


class _Counts(list[int]):
    """Rows of each local expert, as DeepEP returns them: a tensor on the host."""

    def sum(self) -> Tensor:
        return _Total(self)  # type: ignore[return-value]

    def tolist(self) -> list[int]:
        return list(self)


class _Total:
    def __init__(self, counts: list[int]) -> None:
        self._total = sum(counts)

    def item(self) -> int:
        return self._total


def _combine(x: Tensor, group: Any, handle: Any, **_: Any) -> tuple[Tensor, None]:
    out: Tensor = _Combine.apply(x, handle[0])  # type: ignore[no-untyped-call]
    return out, None


def _multihot(self: Any, indices: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """(routing map [n, L] bool, weights [n, L] fp32) of the received rows."""
    chosen = torch.zeros(len(indices), self.num_local_experts, dtype=torch.long, device=indices.device)
    weights = torch.zeros(chosen.shape, dtype=torch.float, device=indices.device)
    columns = indices[:, : min(indices.shape[1], self.num_local_experts)]
    return chosen.bool(), weights.scatter(1, columns, probs[:, : columns.shape[1]])


# ---- HybridEP, which permutes too


def _hybrid_dispatch(balance: Balance) -> Any:
    def hybrid_ep_dispatch(
        x: Tensor, routing_map: Tensor, probs: Tensor, group: Any, num_local_experts: int, **_: Any
    ) -> tuple[Any, ...]:
        slices = routing_map.shape[1] // balance.experts  # as in `_dispatch`
        received = balance.received(len(x) * slices * balance.top_k)
        rows, weights = _Dispatch.apply(x, probs, received)  # type: ignore[no-untyped-call]
        return rows, weights[:, 0], None, _Counts(even(received, num_local_experts)), (len(x), routing_map)

    return hybrid_ep_dispatch


def _hybrid_combine(x: Tensor, handle: Any, **_: Any) -> Tensor:
    out: Tensor = _Combine.apply(x, handle[0])  # type: ignore[no-untyped-call]
    return out

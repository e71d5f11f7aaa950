"""Rows of tokens sorted by their experts, and back, without a synchronization and without atomic sums.

Megatron's dispatchers call `permute`, `unpermute` and `sort_chunks_by_idxs` of their module (megatron-core 0.16.1,
token_dispatcher.py). `sort_on_devices` puts those of this module in their place, which on a CUDA device with Triton
compute the order themselves and elsewhere call megatron's.

Letters: T tokens, E experts, n routed rows, H hidden size.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor

from megatron_bridge.model.kernels.chosen import by_triton


class RowOrder(NamedTuple):
    """The order of routed rows: by expert, and by token of the same expert."""

    sources: Tensor  # [n] int64: the token of each row
    places: Tensor  # [n] int64: the rows of each token, token by token
    ends: Tensor  # [T + 1] int32: where each token's rows begin and end in `places`


def row_order(routing_map: Tensor, rows: int) -> tuple[RowOrder, Tensor]:
    """The order of the `rows` true elements of routing_map [T, E] bool, and int64 [n]: the element of the flattened map
    that each row stands for. Nothing is read on the host.

    The places of an element among those of its token's and of its expert's are prefix sums over the whole map, which
    take a tenth of the time of sums along a dimension. Elements that are not true are written behind the rows.
    """
    tokens, experts = routing_map.shape
    element = torch.arange(tokens * experts, device=routing_map.device)
    of_experts = element.view(tokens, experts).t().flatten()  # the map's elements, expert by expert

    def places_of(flat: Tensor) -> tuple[Tensor, Tensor]:
        """Of each element of a flattened map: its number among the true ones, and where it is written."""
        number = flat.cumsum(0) - 1
        return number, torch.where(flat, number, rows + element)

    def true_ones(where: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(rows + len(element), dtype=torch.int64, device=where.device).scatter_(0, where, values)[
            :rows
        ]

    flat = routing_map.flatten()
    number, by_expert = places_of(routing_map.t().flatten())
    elements = true_ones(by_expert, of_experts)
    place = number.view(experts, tokens).t().flatten()  # token by token
    places = true_ones(places_of(flat)[1], place)
    ends = torch.zeros(tokens + 1, dtype=torch.int32, device=routing_map.device)
    torch.cumsum(routing_map.sum(1, dtype=torch.int32), 0, dtype=torch.int32, out=ends[1:])
    return RowOrder(elements // experts, places, ends), elements


def sort_on_devices() -> None:
    """Replaces the three functions in megatron's module. Idempotent."""
    if not hasattr(token_dispatcher.permute, "of_megatron"):
        for function in (_permute, _unpermute, _sort_chunks):
            name = function.__name__.lstrip("_")
            name = {"sort_chunks": "sort_chunks_by_idxs"}.get(name, name)
            setattr(token_dispatcher, name, function(getattr(token_dispatcher, name)))


def _permute(stock: Any) -> Any:
    @functools.wraps(stock)
    def permute(
        tokens: Tensor,
        routing_map: Tensor,
        probs: Tensor | None = None,
        num_out_tokens: Any = None,
        fused: bool = False,
        drop_and_pad: bool = False,
    ) -> tuple[Tensor, Tensor | None, Any]:
        known = isinstance(num_out_tokens, int) and len(tokens) > 0
        if fused or drop_and_pad or not known or not by_triton("permutation", tokens):
            return stock(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)  # type: ignore[no-any-return]
        from megatron_bridge.model.kernels.gathered_rows import Spread

        order, elements = row_order(routing_map, num_out_tokens)
        weights = None if probs is None else probs.flatten().index_select(0, elements)
        return Spread.apply(tokens, *order), weights, order  # type: ignore[no-untyped-call]

    permute.of_megatron = stock  # type: ignore[attr-defined]
    return permute


def _unpermute(stock: Any) -> Any:
    @functools.wraps(stock)
    def unpermute(permuted_tokens: Tensor, sorted_indices: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(sorted_indices, RowOrder):
            return stock(permuted_tokens, sorted_indices, *args, **kwargs)  # type: ignore[no-any-return]
        assert kwargs.get("probs") is None, "the experts have applied the weights"
        from megatron_bridge.model.kernels.gathered_rows import Gathered

        return Gathered.apply(permuted_tokens, *sorted_indices)  # type: ignore[no-any-return, no-untyped-call]

    return unpermute


def _sort_chunks(stock: Any) -> Any:
    @functools.wraps(stock)
    def sort_chunks_by_idxs(
        input: Tensor, split_sizes: Any, sorted_idxs: Any, probs: Tensor | None = None, fused: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """On a single rank the chunks are in order already, and megatron would copy them."""
        if input.is_cuda and not fused and sorted_idxs.tolist() == list(range(len(sorted_idxs))):
            return input, probs
        return stock(input, split_sizes, sorted_idxs, probs=probs, fused=fused)  # type: ignore[no-any-return]

    return sort_chunks_by_idxs

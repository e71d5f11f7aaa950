"""Functions of TransformerEngine's Triton kernels for routed rows (transformer_engine/pytorch/triton/permutation.py) in
PyTorch, under the same names.

`row_id_map` int32 [T, 2 E + 1] has for each token the places of its rows, from column E on their experts, and in the
last column their number n; other columns mean nothing. Letters: T tokens, E experts, n routed rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """routing_map bool [T, E] -> row_id_map; rows are in the order of experts, then tokens."""
    chosen = routing_map.bool()
    place = (chosen.t().reshape(-1).cumsum(0) - 1).reshape(num_experts, num_tokens).t()
    out = torch.full((num_tokens, 2 * num_experts + 1), -1, dtype=torch.int32)
    for token in range(num_tokens):
        experts = chosen[token].nonzero()[:, 0].flip(0)
        n = len(experts)
        out[token, :n] = place[token, experts].int()
        out[token, num_experts : num_experts + n] = experts.int()
        out[token, -1] = n
    return out


def _pairs(row_id_map: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(token, place, expert) of each routed row, tokens in order; int64."""
    counts = row_id_map[:, -1].long()
    some = torch.arange(num_experts) < counts[:, None]
    token = torch.arange(len(row_id_map)).repeat_interleave(counts)
    return token, row_id_map[:, :num_experts][some].long(), row_id_map[:, num_experts:-1][some].long()


def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int,
) -> tuple[Tensor, None, Tensor | None]:
    """inp [T, H], probs [T, E] -> (rows [n, H], None, the probability of each row [n])."""
    assert scale is None and pad_offsets is None, "neither scales nor padding are emulated"
    token, place, expert = _pairs(row_id_map, num_experts)
    out = inp.new_zeros(num_out_tokens, hidden_size).index_copy_(0, place, inp[token])
    if probs is None:
        return out, None, None
    return out, None, probs.new_zeros(num_out_tokens).index_copy_(0, place, probs[token, expert])


def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """rows [n, H] -> (for each token the sum of its rows, times merging_probs [T, E], FP32 inside; permuted_probs [n]
    at their tokens and experts [T, E], 0 elsewhere)."""
    assert pad_offsets is None, "padding is not emulated"
    token, place, expert = _pairs(row_id_map, num_experts)
    rows = inp[place].float()
    if merging_probs is not None:
        rows = rows * merging_probs[token, expert].float()[:, None]
    out = torch.zeros(num_tokens, hidden_size).index_add_(0, token, rows).to(inp.dtype)
    if permuted_probs is None:
        return out, None
    back = permuted_probs.new_zeros(num_tokens, num_experts)
    back[token, expert] = permuted_probs[place]
    return out, back


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor]:
    """(gradient of the rows [n, H], of the probabilities [T, E])."""
    assert pad_offsets is None, "padding is not emulated"
    token, place, expert = _pairs(row_id_map, num_experts)
    grad = fwd_output_grad[token].float()
    scaled = (grad * merging_probs[token, expert].float()[:, None]).to(fwd_output_grad.dtype)
    rows = fwd_output_grad.new_zeros(num_out_tokens, hidden_size).index_copy_(0, place, scaled)
    of_probs = torch.zeros_like(merging_probs)
    of_probs[token, expert] = (grad * fwd_input[place].float()).sum(-1).to(merging_probs.dtype)
    return rows, of_probs


def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """int32 [T]: where each row goes when chunks of `split_sizes` rows are put into the order `sorted_indices`."""
    sizes, order = split_sizes.long(), sorted_indices.long()
    chunks = torch.arange(num_tokens).split(sizes.tolist())
    sources = torch.cat([chunks[i] for i in order.tolist()])
    out = torch.empty(num_tokens, dtype=torch.int32)
    out[sources] = torch.arange(num_tokens, dtype=torch.int32)
    return out


def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    """Rows [T, H] and probabilities [T] moved to their places, or back."""
    place = row_id_map.long()

    def moved(x: Tensor) -> Tensor:
        return torch.empty_like(x).index_copy_(0, place, x) if is_forward else x[place]

    return moved(inp), None if probs is None else moved(probs)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "make_row_id_map": make_row_id_map,
    "permute_with_mask_map": permute_with_mask_map,
    "unpermute_with_mask_map": unpermute_with_mask_map,
    "unpermute_with_mask_map_bwd_with_merging_probs": unpermute_with_mask_map_bwd_with_merging_probs,
    "make_chunk_sort_map": make_chunk_sort_map,
    "sort_chunks_by_map": sort_chunks_by_map,
}

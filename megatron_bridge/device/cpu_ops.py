"""Replacements for megatron operations that gloo does not support, or that are several times too slow on the CPU.

Each function takes megatron's function and returns its replacement, which `device.py` installs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import ReduceOp, get_world_size
from torch.distributed.distributed_c10d import _world


def gather_uneven(stock: Any) -> Any:
    @functools.wraps(stock)
    def gather(x: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return stock(x, group, None, use_global_buffer)
        longest = max(output_split_sizes)
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: len(x)] = x
        shards = stock(padded, group).split(longest)
        return torch.cat([shard[:n] for shard, n in zip(shards, output_split_sizes, strict=True)])

    return gather


def reduce_scatter_uneven(stock: Any) -> Any:
    @functools.wraps(stock)
    def scatter(x: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return stock(x, group, None, use_global_buffer)
        padded = x.new_zeros(group.size(), max(input_split_sizes), *x.shape[1:])
        for row, shard in zip(padded, x.split(input_split_sizes), strict=True):
            row[: len(shard)] = shard
        return stock(padded.flatten(0, 1), group)[: input_split_sizes[group.rank()]]

    return scatter


def skip_sorted_sort(stock: Any) -> Any:
    @functools.wraps(stock)
    def sort(
        input: torch.Tensor, split_sizes: torch.Tensor, sorted_idxs: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if bool((sorted_idxs.diff() == 1).all()):
            return input, kwargs.get("probs")
        return stock(input, split_sizes, sorted_idxs, *args, **kwargs)  # type: ignore[no-any-return]

    return sort


def unpermute_by_index_add(stock: Any) -> Any:
    @functools.wraps(stock)
    def unpermute(
        permuted_tokens: torch.Tensor,
        sorted_indices: torch.Tensor,
        restore_shape: torch.Size,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if kwargs.get("probs") is not None or kwargs.get("fused") or args:
            return stock(permuted_tokens, sorted_indices, restore_shape, *args, **kwargs)  # type: ignore[no-any-return]
        return permuted_tokens.new_zeros(restore_shape).index_add_(0, sorted_indices, permuted_tokens)

    return unpermute


def swiglu_back(stock: Any) -> Any:
    @functools.wraps(stock)
    def back(g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _swiglu_back(g, y)[0]

    return back


def weighted_swiglu_back(stock: Any) -> Any:
    @functools.wraps(stock)
    def back(g: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_y, product = _swiglu_back(g * weights, y)
        return of_y.to(y.dtype), product.mul_(g).sum(-1, keepdim=True).to(weights.dtype)

    return back


def _swiglu_back(g: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of y [T, 2F], silu(gate) * up [T, F]) from the gradient g [T, F] of the latter, in the wider dtype."""
    of_y = y.new_empty(y.shape, dtype=torch.promote_types(g.dtype, y.dtype))
    gate, up = y.to(of_y.dtype).chunk(2, -1)
    of_gate, of_up = of_y.chunk(2, -1)
    product = F.silu(gate)
    torch.mul(product, g, out=of_up)
    torch.ops.aten.silu_backward(g * up, gate, grad_input=of_gate)
    return of_y, product.mul_(up)


def scale_in_place(stock: Any) -> Any:
    @functools.wraps(stock)
    def scale(chunk_size: Any, overflow: Any, lists: list[list[torch.Tensor]], factor: float) -> None:
        if lists[0] is lists[1]:
            torch._foreach_mul_(lists[1], factor)
        else:
            stock(chunk_size, overflow, lists, factor)

    return scale


def foreach_norm(stock: Any) -> Any:
    @functools.wraps(stock)
    def norm(chunk_size: Any, overflow: Any, lists: list[list[torch.Tensor]], *args: Any) -> tuple[torch.Tensor, None]:
        [tensors] = lists
        return torch.stack(torch._foreach_norm(tensors)).norm()[None].float(), None

    return norm


def skip_all_reduce_of_one_rank(stock: Any) -> Any:
    @functools.wraps(stock)
    def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if not async_op and get_world_size(group) == 1:
            return None
        return stock(tensor, op, group, async_op)

    return all_reduce


def skip_coalescing_of_one_rank(stock: Any) -> Any:
    @functools.wraps(stock)
    @contextlib.contextmanager
    def coalescing(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        with stock(group, device, async_ops) as manager:
            yield manager
            if group.size() == 1:
                _world.pg_coalesce_state[group].clear()  # collectives that would be started on exit

    return coalescing

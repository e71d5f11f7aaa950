"""What megatron's token dispatchers do on their way between ranks, as the CPU needs it; `device.py` puts it in place.

Each function takes megatron's own and returns its replacement.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def gather_uneven(stock: Any) -> Any:
    @functools.wraps(stock)
    def gather(x: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return stock(x, group, None, use_global_buffer)
        longest = max(output_split_sizes)
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: len(x)] = x
        parts = stock(padded, group).split(longest)
        return torch.cat([part[:n] for part, n in zip(parts, output_split_sizes, strict=True)])

    return gather


def reduce_scatter_uneven(stock: Any) -> Any:
    @functools.wraps(stock)
    def scatter(x: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return stock(x, group, None, use_global_buffer)
        padded = x.new_zeros(group.size(), max(input_split_sizes), *x.shape[1:])
        for row, part in zip(padded, x.split(input_split_sizes), strict=True):
            row[: len(part)] = part
        return stock(padded.flatten(0, 1), group)[: input_split_sizes[group.rank()]]

    return scatter


def leave_sorted(stock: Any) -> Any:
    @functools.wraps(stock)
    def sort(
        input: torch.Tensor, split_sizes: torch.Tensor, sorted_idxs: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if bool((sorted_idxs.diff() == 1).all()):
            return input, kwargs.get("probs")
        return stock(input, split_sizes, sorted_idxs, *args, **kwargs)  # type: ignore[no-any-return]

    return sort

"""DeepEP's buffer in PyTorch, over any backend of torch.distributed: a token goes once to each rank that has one of its
experts, and what those ranks return for it is added.

Interface: deep_ep 1.2 as megatron-core 0.16.1 calls it (`fused_a2a.py`). Letters: n tokens here, m received, K choices
a token, H hidden size.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Sizes:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


class EventHandle: ...


class EventOverlap:
    def __init__(self, event: EventHandle | None = None) -> None: ...
    def current_stream_wait(self) -> None: ...


@dataclass(frozen=True)
class Handle:
    """Of one dispatch. rows: of this rank's tokens, in the order in which they are sent; sent, received: to and from
    each rank; tokens: n."""

    rows: Tensor
    sent: list[int]
    received: list[int]
    tokens: int


class Buffer:
    """deep_ep.Buffer."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(count: int) -> None: ...

    @staticmethod
    def get_dispatch_config(ranks: int) -> _Sizes:
        return _Sizes()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, **streams: Any
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """(tokens for each rank, None, tokens of each expert, which ranks a token goes to [n, ranks] bool, event)."""
        ranks = self.group.size()
        chosen = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.bool)
        chosen.scatter_(1, topk_idx.where(topk_idx >= 0, num_experts), True)
        chosen = chosen[:, :num_experts]
        to = chosen.unflatten(1, (ranks, num_experts // ranks)).any(2)
        return to.sum(0), None, chosen.sum(0), to, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        **rest: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, Handle, EventOverlap]:
        """(tokens [m, H], their choices as numbers of this rank's experts, -1 for others [m, K], their weights, 0 for
        others, number of choices of each expert here, handle, event); with a handle the tokens alone."""
        if handle is not None:
            return self._send(x, handle), None, None, None, handle, EventOverlap()
        assert topk_idx is not None and topk_weights is not None and num_tokens_per_expert is not None
        assert is_token_in_rank is not None and topk_weights.dtype is torch.float32
        rows = [to.nonzero()[:, 0] for to in is_token_in_rank.t()]
        sent = [len(r) for r in rows]
        handle = Handle(torch.cat(rows), sent, self._sizes(sent), len(x))
        local = len(num_tokens_per_expert) // self.group.size()
        ids = self._send(topk_idx, handle) - self.group.rank() * local
        weights, here = self._send(topk_weights, handle), (ids >= 0) & (ids < local)
        ids, weights = ids.where(here, -1), weights.where(here, 0.0)
        counts = torch.bincount(ids[here], minlength=local).tolist()
        return self._send(x, handle), ids, weights, counts, handle, EventOverlap()

    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None, **rest: Any
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """(for each token the sum of what its ranks return [n, H], the same of weights [n, K], event)."""
        weights = None if topk_weights is None else self._add(topk_weights, handle)
        return self._add(x, handle), weights, EventOverlap()

    def _sizes(self, sent: list[int]) -> list[int]:
        received = torch.empty(len(sent), dtype=torch.int64)
        dist.all_to_all_single(received, torch.tensor(sent), group=self.group)
        return received.tolist()

    def _send(self, x: Tensor, handle: Handle) -> Tensor:
        out = x.new_empty(sum(handle.received), *x.shape[1:])
        chosen = x.index_select(0, handle.rows)
        dist.all_to_all_single(out, chosen, handle.received, handle.sent, group=self.group)
        return out

    def _add(self, x: Tensor, handle: Handle) -> Tensor:
        back = x.new_empty(sum(handle.sent), *x.shape[1:])
        dist.all_to_all_single(back, x.contiguous(), handle.sent, handle.received, group=self.group)
        out = torch.zeros(handle.tokens, *x.shape[1:], dtype=torch.float32)
        return out.index_add_(0, handle.rows, back.float()).to(x.dtype)


def install() -> None:
    """`import deep_ep` gives this module's classes in this process, from before megatron is imported."""
    for name, members in (
        ("deep_ep", {"Buffer": Buffer}),
        ("deep_ep.utils", {"EventHandle": EventHandle, "EventOverlap": EventOverlap}),
    ):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(members)
        sys.modules[name] = module

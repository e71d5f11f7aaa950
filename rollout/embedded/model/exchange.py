"""The exchange between the ranks of a server in a forward pass: complete outputs, never partial sums.

Letters: T tokens (rows), n outputs of one rank, R rows of experts' outputs, sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from rollout.embedded.model.slices import Slices


class Exchange(Protocol):
    """Every method is called by all ranks, in the same order."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def gathered(self, x: Tensor) -> Tensor:
        """x, of one shape and dtype on all ranks -> [ranks, *x.shape]."""

    def gathered_first(self, x: Tensor) -> Tensor:
        """As `gathered` on rank 0; on the others x[None]."""


class Alone:
    """The exchange of a single rank."""

    size = 1

    def gathered(self, x: Tensor) -> Tensor:
        return x[None]

    def gathered_first(self, x: Tensor) -> Tensor:
        return x[None]


def columns(parts: Tensor) -> Tensor:
    """The result of a gather, [ranks, T, n] -> [T, ranks n]."""
    return parts[0] if len(parts) == 1 else parts.transpose(0, 1).flatten(1)


def embedded(table: Tensor, tokens: Tensor, slices: Slices, exchange: Exchange) -> Tensor:
    """table [V / ranks, D]: the rows of this rank; tokens int64 [T] -> [T, D]."""
    if exchange.size == 1:
        return table[tokens]
    n = len(table)
    own = exchange.gathered(table[(tokens - slices.rank * n).clamp(0, n - 1)])
    return own[tokens // n, torch.arange(len(tokens))]


class ExpertRows:
    """The rows of a MoE layer, sorted by expert, and those that the experts of this rank take.

    counts: rows of each expert of the model.
    """

    def __init__(self, counts: Sequence[int], slices: Slices, exchange: Exchange) -> None:
        ends = [0]
        for n in counts:
            ends.append(ends[-1] + n)
        edges = [ends[slices.experts_of(g).start] for g in range(slices.ep)] + [ends[-1]]
        self._of_group = [b - a for a, b in pairwise(edges)]
        self._slices, self._exchange = slices, exchange
        self.counts = list(counts[slices.experts.start : slices.experts.stop])  # of this rank's experts
        self.own = slice(edges[slices.group], edges[slices.group + 1])

    def complete(self, h: Tensor) -> Tensor:
        """This rank's channels of the outputs of its rows -> all channels of the same rows."""
        if self._slices.expert_tp == 1:
            return h
        return self._of(self._slices.group, self._gathered(h))

    def all(self, y: Tensor) -> Tensor:
        """This rank's channels of the outputs of its rows -> [R, all channels]."""
        if self._exchange.size == 1:
            return y
        found = self._gathered(y)
        return torch.cat([self._of(g, found) for g in range(self._slices.ep)])

    def _gathered(self, y: Tensor) -> Tensor:
        """[ranks, most rows of a group, n]."""
        missing = max(self._of_group) - len(y)
        return self._exchange.gathered(torch.cat([y, y.new_zeros(missing, y.shape[1])]) if missing else y)

    def _of(self, group: int, found: Tensor) -> Tensor:
        each = self._slices.expert_tp
        return columns(found[group * each : (group + 1) * each, : self._of_group[group]])


def check_agreement(chosen: Sequence[Tensor], exchange: Exchange) -> None:
    """chosen: the experts of all tokens, a layer each, int64, which each rank computes. Raises RuntimeError on rank 0
    naming a rank whose choice is another one: its outputs were gathered for other rows."""
    if exchange.size == 1 or not chosen:
        return
    flat = torch.cat([ids.reshape(-1) for ids in chosen])
    digest = (flat + 1).mul_(torch.arange(1, 2 * len(flat), 2).mul_(0x9E3779B97F4A7C1)).sum()
    all_of_them = exchange.gathered_first(digest[None])[:, 0].tolist()
    for rank, other in enumerate(all_of_them):
        if other != all_of_them[0]:
            raise RuntimeError(
                f"rank {rank} of this server chose different experts from rank 0, because its weights differ: "
                "restart the server"
            )

"""Inputs of a rank that is executed on fake tensors: lengths of a pack's samples, and how tokens are spread over
experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from megatron_bridge.config import TrainerConfig

# backward over forward of a flash attention kernel: five products for two (FlashAttention-2, arXiv:2307.08691, 4.1)
BACKWARD = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Every expert gets the same number of tokens, except that this rank gets `imbalance` times the mean."""

    experts: int  # 0: a model without experts
    top_k: int
    groups: int  # of experts, of which a token's router chooses `group_top_k` first
    group_top_k: int
    imbalance: float = 1.0

    def received(self, sent: int) -> int:
        """Rows that a rank receives where each rank sends `sent` of them."""
        return round(self.imbalance * sent)

    def ranks_of_a_token(self, ranks: int) -> float:
        """The mean number of expert-parallel ranks that hold one of a token's experts, for experts drawn evenly from
        the token's groups."""
        groups = self.groups if ranks % max(self.groups, 1) == 0 or self.groups % ranks == 0 else 1
        share = self.group_top_k / self.groups if groups > 1 else 1.0
        experts, held = round(self.experts * share), self.experts // ranks
        if experts <= self.top_k or experts <= held:
            return min(ranks * share, self.top_k) if experts > held else 1.0
        missed = math.comb(experts - held, self.top_k) / math.comb(experts, self.top_k)
        return ranks * share * (1 - missed)


def even(total: int, parts: int) -> list[int]:
    """`total` divided into `parts` whole numbers that differ by at most 1, the larger ones first."""
    share, more = divmod(total, parts)
    return [share + (i < more) for i in range(parts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One micro-batch: the lengths of its samples, with loss on the last `loss_share` of each."""

    lengths: tuple[int, ...]
    loss_share: float = 1.0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def causal_pairs(self) -> float:
        """Number of pairs of a query and a key that it attends to."""
        return sum(n * (n + 1) / 2 for n in self.lengths)


def packed(tokens: int, longest: int, *, loss_share: float = 1.0) -> Pack:
    """A pack of `tokens` with samples of `longest`, the last one shorter. The costliest pack that fits: attention grows
    with the square of a sample's length."""
    longest = min(longest, tokens)
    whole, rest = divmod(tokens, longest)
    return Pack(lengths=(longest,) * whole + ((rest,) if rest else ()), loss_share=loss_share)


@dataclass(slots=True)
class CoreAttention:
    """Floating-point operations of core attention, counted where it is called."""

    pairs: float = 0.0  # of a query and a key that it attends, over this rank's queries of the pack that is running
    flops: float = 0.0

    def forward(self, heads: int, query: int, value: int) -> float:
        """Count a call with `heads` of these sizes; returns what its backward will cost."""
        cost = 2 * heads * (query + value) * self.pairs
        self.flops += cost
        return BACKWARD * cost

    def backward(self, cost: float) -> None:
        self.flops += cost


Device = Literal["cpu", "cuda"]
Parts = dict[str, int]  # bytes by part


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """The execution of one rank. micro_batches: of the step; pack: each of them, over all context-parallel ranks;
    imbalance: tokens that this rank's experts get, in units of the mean; colocated: trainer and engine share the
    device."""

    config: TrainerConfig
    rank: int
    pack: Pack
    micro_batches: int
    device: Device = "cuda"
    imbalance: float = 1.0
    colocated: bool = True


@dataclass(slots=True)
class RankCounts:
    """Counts of an execution; records.ExecutedRank describes the fields."""

    stage: int = 0
    parameters: int = 0
    expert_parameters: int = 0
    static: Parts = field(default_factory=dict)
    peaks: dict[str, Parts] = field(default_factory=dict)
    host: dict[str, Parts] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    stubbed: list[str] = field(default_factory=list)

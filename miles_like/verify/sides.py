"""The two sides that are compared, and what is compared of them.

Letters: S tokens a sample, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from miles_like.verify.weights import WeightEvidence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fed:
    """Tokens as one side has them."""

    tokens: tuple[Tensor, ...]  # [S] int64 of each sample
    masks: tuple[Tensor, ...]  # [S] bool: the policy sampled it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """What the trainer says of all samples."""

    fed: Fed  # what its ranks were fed
    logprobs: tuple[Tensor, ...]  # [S] fp32 of each: of token i given those before it; 0 where not under loss
    routes: tuple[Tensor, ...] | None  # [S-1, L, K] of each: its own choice; None: it has none, or was told


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """Samples as the rollout reported them."""

    names: tuple[str, ...]
    told: Fed
    logprobs: tuple[Tensor, ...]  # [S] fp32
    routes: tuple[Tensor, ...] | None  # [S-1, L, K]
    prompts: tuple[Sequence[int], ...] | None = None  # what tokenizer and template make of each prompt now


class TrainerSide(Protocol):
    """Who trains on the samples."""

    async def score(self, told: Fed, *, temperature: float, routes: Sequence[Tensor] | None) -> Scores:
        """`routes`: [S-1, L, K] of each sample, taken in place of its own choice."""


class RolloutSide(Protocol):
    """Who sampled them."""

    async def score(self, told: Fed) -> tuple[Tensor, ...]:
        """[S] fp32 of each sample: its own log-probabilities at temperature 1, computed as of a prompt."""

    async def mend(self) -> Sampled | None:
        """Publish the trainer's weights to it and have it sample anew; None where it does not take them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """All that is compared. What is None cannot be, and the verdict of its step is "not compared"."""

    sampled: Sampled
    layers: tuple[int, ...]  # [L] global numbers
    temperature: float  # at which the run means to sample, and the trainer computes
    top_p: float = 1.0  # the same
    top_k: int = -1  # the same
    trainer: TrainerSide
    replay: bool = False  # whether the run replays the rollout's routes
    weights: WeightEvidence | str = "no hashes were asked for"  # a string: the reason why they are not compared
    rollout: RolloutSide | None = None

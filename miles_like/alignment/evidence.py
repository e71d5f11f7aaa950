"""Inputs of `attribute`: samples of the rollout, interfaces to both sides, weight hashes.

Letters: S tokens a sample, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from miles_like.alignment.weights import WeightEvidence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleTokens:
    """Tokens of all samples on one side."""

    ids: tuple[Tensor, ...]  # [S] int64 per sample
    masks: tuple[Tensor, ...]  # [S] bool per sample: true for tokens that the policy sampled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """The trainer's forward pass over all samples."""

    tokens: SampleTokens  # as packed for the ranks
    logprobs: tuple[Tensor, ...]  # [S] fp32 per sample: of token i given the tokens before it; 0 outside the loss mask
    routes: tuple[Tensor, ...] | None  # [S-1, L, K] per sample, the trainer's own; None: dense model, or replayed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """Samples as the rollout reported them."""

    names: tuple[str, ...]
    tokens: SampleTokens
    logprobs: tuple[Tensor, ...]  # [S] fp32
    routes: tuple[Tensor, ...] | None  # [S-1, L, K]
    prompts: tuple[Sequence[int], ...] | None = None  # each prompt as the tokenizer and template encode it now


class TrainerScorer(Protocol):
    """Scores samples with the trainer's weights."""

    async def score(self, tokens: SampleTokens, *, temperature: float, routes: Sequence[Tensor] | None) -> Scores:
        """`routes`: [S-1, L, K] per sample, replayed in place of the trainer's own."""


class RolloutScorer(Protocol):
    """Scores samples with a rollout server, and can update its weights."""

    async def score(self, tokens: SampleTokens) -> tuple[Tensor, ...]:
        """[S] fp32 per sample: the server's log-probabilities at temperature 1, computed in a prefill."""

    async def republish(self) -> Sampled | None:
        """Publish the trainer's weights to the servers and sample again; None where publication is not allowed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """The inputs of one comparison. A step whose input is None gets the verdict "not compared"."""

    sampled: Sampled
    layers: tuple[int, ...]  # [L] global numbers
    temperature: float  # the configured one, at which the trainer computes
    top_p: float = 1.0  # the configured one
    top_k: int = -1  # the configured one
    trainer: TrainerScorer
    replay: bool = False  # whether the run replays the rollout's routes
    weights: WeightEvidence | str = "no hashes were requested"  # a string: the reason why they are not compared
    rollout: RolloutScorer | None = None

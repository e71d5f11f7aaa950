"""On-policy distillation: the student samples, a teacher scores the sampled tokens, and the student is trained towards
the teacher's distribution on its own samples (Agarwal et al., GKD, arXiv:2306.13649; the last stage of Qwen3's small
models, arXiv:2505.09388; https://thinkingmachines.ai/blog/on-policy-distillation/).

With p the student and q the teacher after the same tokens, there are two forms:

* sampled tokens: the advantage of y_t is coefficient * (log q(y_t) - log p(y_t)), with p as sampled. Its mean over p is
  minus the reverse KL(p || q) at that position; a token's advantage concerns its own position only (discount 0).
  Ratio, clipping and corrections are the algorithm's.
* candidates: coefficient * D(p || q) is added to the loss, with its gradient through p. D is over the teacher's C most
  likely tokens at that position and one bucket for all others (log 1 - sum): a lower bound of the divergence over the
  whole vocabulary, since merging outcomes never increases a divergence, and equal to it where p / q is the same for all
  others. There is no gradient through the choice of the preceding tokens.

Letters: G samples a prompt, S tokens a sample, T packed tokens, C candidates a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from miles_like.algorithms.advantages.parts import InParts, OfSamples, Placed
from miles_like.algorithms.terms.mismatch import mean_stat
from miles_like.config.sections.distillation import DistillationConfig
from miles_like.protocols import AdvantageParts, Algorithm, LossFn, Numbers
from miles_like.types import (
    TAUGHT,
    TEACHER,
    TEACHER_CANDIDATES,
    Aggregation,
    LossInputs,
    LossOutput,
    Sample,
    SampleGroup,
)

# Least probability of the bucket of other tokens: each fp32 term makes a sum of probabilities inexact by about 1e-7.
_LEAST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Distilled:
    """An algorithm whose advantages are the teachers' (mode "alone"), or the teachers' and its own ("added").

    of_candidates: the teachers' part is in the loss, so that with mode "alone" advantages are 0. Aggregation and the
    loss's other terms (such as a penalty for leaving the reference) are the algorithm's.
    """

    base: Algorithm
    mode: Literal["alone", "added"]
    coefficient: float
    of_candidates: bool
    loss: LossFn

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def aggregation(self) -> Aggregation:
        return self.base.aggregation

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({TEACHER}) | (self.base.needs if self.mode == "added" else frozenset())

    @property
    def parts(self) -> AdvantageParts | None:
        own = self.base.parts if self.mode == "added" else OfSamples(_none)
        return own if own is None or self.of_candidates else Taught(base=own, coefficient=self.coefficient)

    def advantages(self, groups: Sequence[SampleGroup]) -> Sequence[Sequence[float | Tensor]]:
        """For each group [G] of [S] fp32. With mode "added" raises ValueError as the algorithm does."""
        own = self.base.advantages(groups) if self.mode == "added" else _none(groups)
        return own if self.of_candidates else _taught(groups, own, self.coefficient)

    def returns(self, groups: Sequence[SampleGroup]) -> Sequence[Sequence[Tensor]] | None:
        """The algorithm's; None with mode "alone", which has no critic."""
        return self.base.returns(groups) if self.mode == "added" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught(InParts):
    """The advantages of `base` plus the teachers', which are of the sample's own tokens."""

    base: AdvantageParts
    coefficient: float

    @property
    def measures(self) -> bool:  # type: ignore[override]
        return self.base.measures

    def measure(self, groups: Sequence[SampleGroup]) -> tuple[Sequence[SampleGroup], Sequence[Sequence[Numbers]]]:
        return self.base.measure(groups)

    def decide(
        self, groups: Sequence[SampleGroup], numbers: Sequence[Sequence[Numbers]]
    ) -> Sequence[Sequence[Numbers]]:
        return self.base.decide(groups, numbers)

    def place(self, groups: Sequence[SampleGroup], decided: Sequence[Sequence[Numbers]]) -> Placed:
        return _taught(groups, self.base.place(groups, decided), self.coefficient)


def _taught(groups: Sequence[SampleGroup], own: Placed, coefficient: float) -> list[list[Tensor]]:
    return [
        [a + coefficient * log_ratio(s) for a, s in zip(of_group, g.samples, strict=True)]
        for of_group, g in zip(own, groups, strict=True)
    ]


def _none(groups: Sequence[SampleGroup]) -> list[list[float]]:
    return [[0.0] * len(g.samples) for g in groups]


def distilled(
    base: Algorithm, *, mode: Literal["alone", "added"], coefficient: float, top_k: int, beta: float = 1.0
) -> Distilled:
    """`base` with teachers. top_k: number of candidates, 0 for the form of sampled tokens; beta: of `divergence`."""
    loss = base.loss if not top_k else CandidateLoss(base=base.loss, coefficient=coefficient, beta=beta)
    return Distilled(base=base, mode=mode, coefficient=coefficient, of_candidates=top_k > 0, loss=loss)


def with_teachers(base: Algorithm, config: DistillationConfig) -> Algorithm:
    """`base`, extended by the advantage or the loss of the configured teachers; `base` itself without teachers."""
    d = config.teaching
    if d is None:
        return base
    beta = 1.0 if d.candidates is None or d.candidates.beta is None else d.candidates.beta
    return distilled(base, mode=d.mode, coefficient=d.coefficient, top_k=config.top_k, beta=beta)


def log_ratio(sample: Sample) -> Tensor:
    """[S] fp32 log q - log p of the sampled tokens; 0 where no teacher scored."""
    taught = sample.streams[TAUGHT] > 0
    return torch.where(taught, sample.streams[TEACHER] - sample.logprobs, 0.0)


def divergence(student: Tensor, teacher: Tensor, *, beta: float = 1.0) -> Tensor:
    """[T] divergence in nats, never negative, from log-probabilities [T, C] of the same candidates. The gradient goes
    through the student.

    Over the candidates and the bucket of all others, GKD's generalized Jensen-Shannon divergence (arXiv:2306.13649 eq.
    1): beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p; beta = 1 is KL(p || q) and beta = 0 is
    KL(q || p), its limits after division by 1 - beta and by beta. The bucket's probability is at least 1e-6 on both
    sides.
    """
    p, q = _with_others(student), _with_others(teacher)
    if beta in (0.0, 1.0):
        a, b = (p, q) if beta else (q, p)
        return _kl(a, b)
    mixture = torch.logaddexp(p + math.log1p(-beta), q + math.log(beta))
    return beta * _kl(q, mixture) + (1 - beta) * _kl(p, mixture)


def _with_others(candidates: Tensor) -> Tensor:
    """[T, C] log-probabilities -> [T, C + 1]; the last one is of all other tokens together."""
    others = (1 - candidates.exp().sum(-1, keepdim=True)).clamp(min=_LEAST).log()
    return torch.cat([candidates, others], -1)


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """[T] KL(a || b) of log-probabilities [T, C]."""
    return (a.exp() * (a - b)).sum(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateLoss:
    """The algorithm's loss plus coefficient * `divergence` at tokens that a teacher scored."""

    base: LossFn
    coefficient: float
    beta: float = 1.0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """[T] loss, and the algorithm's statistics with `distill/candidates_divergence` and
        `distill/teacher_others`."""
        loss, stats = self.base(inputs)
        candidate_logprobs, streams = inputs.candidate_logprobs, inputs.streams
        assert candidate_logprobs is not None, "the micro-batch has candidates, but the trainer did not score them"
        taught = inputs.loss_mask & (streams[TAUGHT] > 0)
        # Elsewhere both sides are the same distribution, so that no value there can overflow into the gradient.
        even = -math.log(candidate_logprobs.shape[1] + 1)
        student = torch.where(taught[:, None], candidate_logprobs, even)
        teacher = torch.where(taught[:, None], streams[TEACHER_CANDIDATES], even)
        apart = torch.where(taught, divergence(student, teacher, beta=self.beta), 0.0)
        return loss + self.coefficient * apart, {
            **stats,
            "distill/candidates_divergence": mean_stat(apart, taught),
            "distill/teacher_others": mean_stat(1 - teacher.exp().sum(-1), taught),
        }


def taught_numbers(groups: Sequence[SampleGroup]) -> list[list[Numbers]]:
    """For each group [G]: scored tokens of the sample, and their sums of log p - log q and of log q."""

    def of(s: Sample) -> Numbers:
        taught = s.streams[TAUGHT] > 0
        return float(taught.sum()), -float(log_ratio(s).sum()), float(s.streams[TEACHER][taught].sum())

    return [[of(s) for s in g.samples] for g in groups]


def distill_metrics(
    groups: Sequence[SampleGroup], numbers: Sequence[Sequence[Numbers]], teacher_of: Callable[[str], str | None]
) -> dict[str, float]:
    """`distill/*` of a rollout, over all scored tokens and per teacher. numbers: as `taught_numbers`; teacher_of:
    prompt source -> teacher."""
    found: dict[str, Numbers] = {}  # name, "" for all -> the sums of its samples' numbers
    for group, of_group in zip(groups, numbers, strict=True):
        for own in of_group:
            for name in ("", teacher_of(group.prompt.source)):
                if name is not None:
                    sums = found.setdefault(name, (0.0, 0.0, 0.0))
                    found[name] = tuple(a + b for a, b in zip(sums, own, strict=True))
    out = {}
    for name, (tokens, apart, logprob) in found.items():
        end = f"/{name}" if name else ""
        out[f"distill/tokens{end}"] = tokens
        if tokens:
            out |= {f"distill/reverse_kl{end}": apart / tokens, f"distill/teacher_logprob{end}": logprob / tokens}
    return out

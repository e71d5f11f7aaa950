"""Losses that act on the few tokens whose log-probability and advantage vary together most, which are the ones that
lower the entropy (arXiv:2505.22617).

Tokens are chosen within a micro-batch, as in verl: with these losses, unlike with all others, a step depends on how its
samples are packed. The choice is a function of the micro-batch alone, so that all ranks that hold it make the same one.

Letters: N samples a micro-batch, T packed tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_like.algorithms.losses.base import PolicyLoss
from miles_like.algorithms.losses.clipped import check_bounds, clip_stats, ratio_stats
from miles_like.algorithms.terms.mismatch import mean_stat
from miles_like.types import Stat


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCovLoss(PolicyLoss):
    """S = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and 0 at tokens that are drawn at random, max(1, cov_ratio
    times the number of loss tokens) of them, among those with cov_low < cov < cov_high which the clip leaves alone
    (Clip-Cov, arXiv:2505.22617, eq. 11 and 12).

    cov = (A - mean A) (log p_train - mean log p_train), means over the micro-batch's loss tokens.
    """

    clip_low: float
    clip_high: float
    cov_ratio: float
    cov_low: float
    cov_high: float

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        check_bounds(self.clip_low, self.clip_high)
        if not self.cov_low < self.cov_high:
            raise ValueError(f"cov_low {self.cov_low} must be below cov_high {self.cov_high}")

    def _surrogate(
        self, *, delta: Tensor, logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
    ) -> tuple[Tensor, dict[str, Stat]]:
        ratio = delta.exp()
        plain, clipped = ratio * advantages, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        cov = _covariance(logprobs, advantages, loss_mask)
        near = (cov > self.cov_low) & (cov < self.cov_high) & loss_mask & ~(clipped < plain)
        chosen = _drawn(near, _count(self.cov_ratio, loss_mask), seed=_seed(logprobs, advantages))
        return torch.where(chosen, 0.0, torch.minimum(plain, clipped)), {
            **clip_stats(ratio, advantages, loss_mask, low=self.clip_low, high=self.clip_high),
            "train/cov/chosen_frac": mean_stat(chosen, loss_mask),
            **ratio_stats(ratio, loss_mask),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCovLoss(PolicyLoss):
    """S = r A, minus cov_coefficient |log r| at the max(1, cov_ratio times the number of loss tokens) tokens of largest
    cov (KL-Cov, arXiv:2505.22617, eq. 13; cov as in `ClipCovLoss`)."""

    cov_ratio: float
    cov_coefficient: float

    def _surrogate(
        self, *, delta: Tensor, logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
    ) -> tuple[Tensor, dict[str, Stat]]:
        ratio = delta.exp()
        cov = torch.where(loss_mask, _covariance(logprobs, advantages, loss_mask), -torch.inf)
        chosen = torch.zeros_like(loss_mask)
        if count := min(_count(self.cov_ratio, loss_mask), int(loss_mask.sum())):
            chosen[cov.topk(count).indices] = True
        penalty = torch.where(chosen, self.cov_coefficient * delta.abs(), 0.0)
        return ratio * advantages - penalty, {
            "train/cov/chosen_frac": mean_stat(chosen, loss_mask),
            **ratio_stats(ratio, loss_mask),
        }


def _covariance(logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """[T], without gradient; 0 outside the mask in both factors' sums."""
    n = loss_mask.sum().clamp(min=1)
    a, b = (x.detach() - torch.where(loss_mask, x.detach(), 0.0).sum() / n for x in (advantages, logprobs))
    return a * b


def _count(ratio: float, loss_mask: Tensor) -> int:
    """How many tokens are chosen, at least 1."""
    return max(int(ratio * int(loss_mask.sum())), 1)


def _drawn(candidates: Tensor, count: int, *, seed: int) -> Tensor:
    """[T] bool: `count` of the candidates at random, or all if there are fewer."""
    at = candidates.nonzero()[:, 0]
    order = torch.randperm(len(at), generator=torch.Generator().manual_seed(seed)).to(at.device)
    out = torch.zeros_like(candidates)
    out[at[order[:count]]] = True
    return out


def _seed(*values: Tensor) -> int:
    """Of the values' bits: the same on every rank and after a resume, another one in each micro-batch."""
    digest = hashlib.blake2b(digest_size=8)
    for x in values:
        digest.update(x.detach().cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1

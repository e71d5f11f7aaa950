"""`log_ratio_clamp` and `k3_clamp` with verl's values are verl 0.9.1's formulas (`core_algos.py`: the vanilla and GSPO
policy losses, `kl_penalty_forward`), which are written out here again; by default nothing is clamped.

Values and gradients are compared over log-ratios of up to 60 nats, far beyond both clamps.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.algorithms.advantages.penalty import KlPenalty
from miles_like.algorithms.registry import make_algorithm
from miles_like.algorithms.terms.kl import kl_estimate
from miles_like.config.load import load_config
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.config.sections.flat import values
from miles_like.types import LossInputs
from tests.support.refusals import Facts, refuses

TINY = Path(__file__).parents[3] / "configs" / "tiny.toml"
SAMPLES, TOKENS = 12, 10
ADVANTAGES = torch.tensor([1.5, -0.7]).repeat(SAMPLES // 2).repeat_interleave(TOKENS).double()
MASK = torch.arange(SAMPLES * TOKENS) % TOKENS > 1


def log_probs(spread: float) -> tuple[Tensor, Tensor]:
    """fp64 [T] old log-probabilities and new ones, which differ by up to `spread` nats, sample by sample one way."""
    g = torch.Generator().manual_seed(0)
    old = -5 * torch.rand(SAMPLES * TOKENS, generator=g, dtype=torch.float64)
    way = torch.linspace(-1, 1, SAMPLES, dtype=torch.float64).repeat_interleave(TOKENS)
    return old, old + spread * way + torch.randn(len(old), generator=g, dtype=torch.float64)


def loss_of(old: Tensor, new: Tensor, ref: Tensor | None = None, **keys: Any) -> Tensor:
    made = make_algorithm(AlgorithmConfig(**keys), CorrectionConfig()).loss
    return made(
        LossInputs(
            logprobs=new,
            entropy=torch.zeros_like(new),
            rollout_logprobs=old,
            advantages=ADVANTAGES,
            loss_mask=MASK,
            cu_seqlens=torch.arange(0, SAMPLES * TOKENS + 1, TOKENS, dtype=torch.int32),
            ref_logprobs=ref,
            old_logprobs=old,
            streams={},
            candidate_logprobs=None,
        )
    )[0]


def vanilla(old: Tensor, new: Tensor) -> Tensor:
    ratio = (new - old).clamp(-20, 20).exp()
    clipped = torch.maximum(-ADVANTAGES * ratio, -ADVANTAGES * ratio.clamp(0.8, 1.28))
    return torch.where(ADVANTAGES < 0, torch.minimum(-ADVANTAGES * 3.0, clipped), clipped)


def group_sequence(old: Tensor, new: Tensor) -> Tensor:
    count = MASK.view(SAMPLES, TOKENS).sum(1)
    mean = ((new - old) * MASK).view(SAMPLES, TOKENS).sum(1) / count
    ratio = (new - new.detach() + mean.detach().repeat_interleave(TOKENS)).clamp(max=10).exp()
    return torch.maximum(-ADVANTAGES * ratio, -ADVANTAGES * ratio.clamp(1 - 3e-4, 1 + 4e-4))


def k3(ref: Tensor, new: Tensor) -> Tensor:
    d = (ref - new).clamp(-20, 20)
    return (d.exp() - d - 1).clamp(-10, 10)


def compared(ours: Tensor, theirs: Tensor, at: Tensor, *, of_samples: bool = False) -> None:
    """Sums of loss and gradient over a sample's tokens; each token's where they are of tokens."""
    for got, want in ((ours * MASK, theirs * MASK), *(_gradients(ours, theirs, at),)):
        if of_samples:
            got, want = (x.view(SAMPLES, TOKENS).sum(1) for x in (got, want))
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def _gradients(ours: Tensor, theirs: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.autograd.grad((loss * MASK).sum(), at, retain_graph=True)[0] for loss in (ours, theirs))  # type: ignore[return-value]


@pytest.mark.parametrize("spread", [0.1, 60.0])
def test_the_clipped_loss_is_verl_s(spread: float) -> None:
    old, new = log_probs(spread)
    new.requires_grad_()
    ours = loss_of(old, new, clip_dual=3.0, log_ratio_clamp=20.0)
    compared(ours, vanilla(old, new), new)
    free = loss_of(old, new, clip_dual=3.0)
    assert torch.equal(free, ours) == (spread < 1)


@pytest.mark.parametrize("spread", [0.1, 60.0])
def test_gspo_is_verl_s(spread: float) -> None:
    """There each token of a sample carries the whole ratio's gradient in its own log-probability, here all of them
    carry a share of it: the same once a sample's tokens, which verl averages, are added."""
    old, new = log_probs(spread)
    new.requires_grad_()
    ours = loss_of(old, new, name="gspo", log_ratio_clamp=10.0)
    compared(ours, group_sequence(old, new), new, of_samples=True)
    assert torch.equal(loss_of(old, new, name="gspo"), ours) == (spread < 1)


@pytest.mark.parametrize("spread", [0.1, 60.0])
def test_k3_is_verl_s_in_loss_and_reward(spread: float) -> None:
    ref, new = log_probs(spread)
    new.requires_grad_()
    keys: dict[str, Any] = {"log_ratio_clamp": 20.0, "k3_clamp": 10.0}
    none = loss_of(new.detach(), new, ref, log_ratio_clamp=20.0)
    with_kl = loss_of(new.detach(), new, ref, kl_coefficient=0.25, **keys)
    compared(with_kl - none, 0.25 * k3(ref, new), new)
    torch.testing.assert_close(kl_estimate(ref - new, "k3", **keys), k3(ref, new))
    config = AlgorithmConfig(kl_coefficient=0.25, kl_in="reward", kl_estimator="k3", **keys)
    made = make_algorithm(config, CorrectionConfig())
    penalty = made.advantage.penalty  # type: ignore[attr-defined]
    assert penalty == KlPenalty(coefficient=0.25, estimator="k3", **keys)


def test_nothing_is_clamped_unless_asked_for() -> None:
    """And a value that is not a number comes through a clamp."""
    unset = values(AlgorithmConfig(kl_coefficient=0.1))
    assert unset["log_ratio_clamp"] is unset["k3_clamp"] is None
    wide = torch.tensor([-60.0, 60.0]).double()
    assert torch.equal(kl_estimate(wide, "k3"), torch.expm1(wide) - wide)
    old, new = log_probs(1.0)
    new[3] = math.nan
    assert loss_of(old, new, log_ratio_clamp=20.0)[3].isnan()


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (["algorithm.k3_clamp=10"], ("algorithm.k3_clamp", 10.0, "algorithm.kl_coefficient", 0.0)),
        (["algorithm.loss=reinforce", "algorithm.log_ratio_clamp=20"], ("algorithm.log_ratio_clamp", 20.0)),
        (
            ["algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k2", "algorithm.k3_clamp=10"],
            ("algorithm.k3_clamp", 10.0, "algorithm.kl_estimator", "k2"),
        ),
        (
            ["algorithm.loss=own:loss", "algorithm.log_ratio_clamp=20"],
            ("algorithm.loss", "own:loss"),
        ),
    ],
)
def test_a_clamp_that_would_do_nothing_is_refused(settings: list[str], facts: Facts) -> None:
    with refuses(ValueError, *facts):
        load_config(TINY, settings)

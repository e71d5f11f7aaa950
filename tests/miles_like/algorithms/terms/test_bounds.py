"""Bounds on mismatch: which figures break them, what then weighs less, what stops a run.

By hand. Not covered: that a run asks (tests/e2e).
"""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from miles_like.algorithms.losses.clipped import ClippedLoss
from miles_like.algorithms.registry import make_algorithm, make_bounds
from miles_like.algorithms.terms.bounds import Bounds
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.config.sections.watched.mismatch import MismatchConfig
from miles_like.loop.step_bounds import StepBounds
from miles_like.types import LossInputs
from tests.support.refusals import check_refusal, refuses

FIGURES = {"mismatch/kl": 0.02, "mismatch/logprob_abs_diff_max": 0.5, "mismatch/extreme_frac": 0.0}
SIDES = {
    "old_logprobs": torch.tensor([-1.0, -1.0, -3.0, -2.0, -2.0]),
    "rollout_logprobs": torch.tensor([-1.0, -1.0, -2.0, -2.1, -9.0]),
    "loss_mask": torch.tensor([False, True, True, True, False]),
    "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
}


def test_each_bound_has_its_figure() -> None:
    assert Bounds().broken(FIGURES) == [] == Bounds(kl_max=0.02, extreme_frac_max=0.0).broken(FIGURES)
    assert Bounds(kl_max=0.01).broken(FIGURES) == ["mismatch/kl = 0.02 is above mismatch.kl_max = 0.01"]
    (message,) = Bounds(logprob_abs_diff_max=0.4, kl_max=1.0).broken(FIGURES)
    check_refusal(message, "mismatch/logprob_abs_diff_max", 0.5, 0.4)
    assert Bounds(kl_max=0.1).broken({}) == []


def test_what_is_not_a_number_is_above_every_bound() -> None:
    assert len(Bounds(kl_max=9.0).broken({"mismatch/kl": math.nan})) == 1
    (message,) = Bounds(kl_max=9.0).broken({"mismatch/kl": 0.0, "mismatch/nan_frac": 0.5})
    check_refusal(message, "mismatch/nan_frac", 0.5)


def test_weights_by_hand() -> None:
    """Log-ratios under loss: 0 and -1 in the first sample, 0.1 in the second."""
    k3 = (math.exp(-1) - 1 + 1) / 2
    for bounds, want in (
        (Bounds(kl_max=k3 / 4), [0, 0.25, 0.25, 1, 0]),
        (Bounds(logprob_abs_diff_max=0.2), [0, 1, 0.2, 1, 0]),
        (Bounds(extreme_frac_max=0.1), [0, 0.2, 0.2, 1, 0]),
        (Bounds(logprob_abs_diff_max=0.0), [0, 1, 0, 0, 0]),
        (Bounds(kl_max=k3 / 4, logprob_abs_diff_max=0.2), [0, 0.25, 0.2, 1, 0]),
        (Bounds(kl_max=1.0), [0, 1, 1, 1, 0]),
    ):
        weight, stats = bounds.weights(**SIDES)
        torch.testing.assert_close(weight, torch.tensor(want, dtype=torch.float32))
        mean = stats["train/mismatch_weight/mean"]
        assert float(mean.total / mean.count) == pytest.approx(sum(want) / 3)


def test_a_token_that_is_not_finite_is_not_dropped_in_silence() -> None:
    sides = SIDES | {"old_logprobs": torch.tensor([-1.0, -1.0, -math.inf, -2.0, -2.0])}
    weight, _ = Bounds(kl_max=0.1).weights(**sides)
    assert weight[1:3].isnan().all() and float(weight[3]) == 1.0


def test_the_loss_weighs_by_them() -> None:
    """In place, beside any correction; without bounds nothing changes."""
    more = {
        "logprobs": SIDES["old_logprobs"],
        "entropy": torch.zeros(5),
        "advantages": torch.ones(5),
        "ref_logprobs": None,
    }
    inputs = LossInputs(**more, **SIDES)
    plain = ClippedLoss(clip_low=0.2, clip_high=0.2)
    bound = ClippedLoss(clip_low=0.2, clip_high=0.2, bounds=Bounds(logprob_abs_diff_max=0.2))
    (before, _), (after, stats) = plain(inputs), bound(inputs)
    weight, _ = Bounds(logprob_abs_diff_max=0.2).weights(**SIDES)
    torch.testing.assert_close(after, before * weight)
    assert "train/mismatch_weight/reduced_frac" in stats


def test_gradients_are_weighed_as_the_loss_is() -> None:
    """Of each token by bound over figure, by the closed form: with p_train = p_old the gradient of -w A r is -w A. None
    goes through the weight itself."""
    old, rollout, mask = SIDES["old_logprobs"], SIDES["rollout_logprobs"], SIDES["loss_mask"]
    delta = torch.where(mask, old - rollout, 0.0).double()
    k3 = torch.expm1(delta) - delta
    of_samples = torch.tensor([k3[1:3].mean()] * 3 + [k3[3]] * 2)  # [0, 3) has two tokens under loss, [3, 5) one
    bound = 0.25 * float(of_samples[0])
    want = torch.where(mask, (bound / of_samples).clamp(max=1.0), 0.0)
    advantages = torch.tensor([1.0, 2.0, -1.0, 0.5, 1.0])
    logprobs = old.clone().requires_grad_()
    loss, _ = ClippedLoss(clip_low=0.2, clip_high=0.2, bounds=Bounds(kl_max=bound))(
        LossInputs(logprobs=logprobs, entropy=torch.zeros(5), advantages=advantages, ref_logprobs=None, **SIDES)
    )
    loss.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad.double(), -want * advantages)
    assert 0 < float(want[1]) < 1 == float(want[3])
    weight, _ = Bounds(kl_max=bound).weights(**(SIDES | {"old_logprobs": logprobs}))
    assert not weight.requires_grad


def test_only_down_weighting_reaches_the_loss() -> None:
    for action in ("warn", "stop", "down_weight"):
        config = MismatchConfig(kl_max=0.1, on_breach=action)
        made = make_algorithm(AlgorithmConfig(), CorrectionConfig(), config).loss
        assert isinstance(made, ClippedLoss)
        assert made.bounds == (make_bounds(config) if action == "down_weight" else None)


@pytest.mark.parametrize("action", ["stop", "down_weight"])
def test_a_breach_without_a_bound_is_refused(action: str) -> None:
    with refuses(ValidationError, "mismatch.on_breach", action):
        MismatchConfig(on_breach=action)


def test_what_becomes_of_a_step() -> None:
    out = io.StringIO()
    console = Console(file=out, width=200)
    StepBounds(bounds=Bounds(kl_max=1.0), on_breach="stop", console=console).check(3, FIGURES)
    assert not out.getvalue()
    StepBounds(bounds=Bounds(kl_max=0.01), on_breach="warn", console=console).check(3, FIGURES)
    assert "warning: step 3: mismatch/kl = 0.02 is above mismatch.kl_max = 0.01" in out.getvalue()
    with refuses(RuntimeError, 3, "mismatch/kl", 0.02):
        StepBounds(bounds=Bounds(kl_max=0.01), on_breach="stop", console=console).check(3, FIGURES)


def test_every_figure_is_documented() -> None:
    page = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    for key in Bounds(kl_max=0.1).weights(**SIDES)[1]:
        assert f"`{key}`" in page, key

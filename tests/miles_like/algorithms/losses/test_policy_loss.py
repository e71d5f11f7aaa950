"""Losses against closed forms, autograd's finite differences and an independent expression.

A loss must be exactly the function its name says, as every trained weight depends on it. Not covered: the trainer's
sum over micro-batches and ranks, and its division by the batch's token count.
"""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.algorithms.losses.clipped import ClippedLoss
from miles_like.algorithms.sft import NllLoss
from miles_like.algorithms.terms.sequences import sequence_lengths, sequence_sums
from miles_like.types import LossInputs
from tests.support.refusals import refuses

LOSS = ClippedLoss(clip_low=0.2, clip_high=0.28)


def call(fn, logprobs, *, old=None, advantages=None, mask=None, cu=None, entropy=None, ref=None, trainer_old=None):
    t = len(logprobs)
    return fn(
        LossInputs(
            logprobs=logprobs,
            entropy=torch.ones(t) if entropy is None else entropy,
            rollout_logprobs=torch.zeros(t) if old is None else old,
            advantages=torch.ones(t) if advantages is None else advantages,
            loss_mask=torch.ones(t, dtype=torch.bool) if mask is None else mask,
            cu_seqlens=torch.tensor([0, t] if cu is None else cu, dtype=torch.int32),
            ref_logprobs=ref,
            old_logprobs=trainer_old,
        )
    )


def value(stat) -> float:
    return float(stat.total / stat.count) if stat.reduce == "mean" else float(stat.total)


def test_hand_made_ratios():
    """Four quadrants: good and bad samples, each with the ratio inside and outside its bound."""
    ratio = torch.tensor([1.1, 2.0, 0.5, 0.5, 2.0])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    loss, stats = call(LOSS, ratio.log(), advantages=advantages)
    assert loss.tolist() == pytest.approx([-1.1, -1.28, -0.5, 0.8, 2.0])
    assert value(stats["train/clip_frac/low"]) == pytest.approx(1 / 5)
    assert value(stats["train/clip_frac/high"]) == pytest.approx(1 / 5)
    assert value(stats["train/is_weight/mean"]) == pytest.approx(6.1 / 5)
    assert value(stats["train/is_weight/max"]) == pytest.approx(2.0)
    assert value(stats["train/pg_loss"]) == pytest.approx(-0.08 / 5, abs=1e-6)
    assert value(stats["train/kl_old"]) == pytest.approx(-float(ratio.log().mean()))


def test_with_old_logprobs_the_ratio_is_to_them_and_the_mismatch_is_theirs():
    """The second step of a rollout: the policy has moved by ln 2 since the first, which the rollout saw exactly."""
    old = torch.tensor([-1.0, -2.0])
    loss, stats = call(LOSS, old + math.log(2), old=old, trainer_old=old, advantages=torch.tensor([1.0, -1.0]))
    assert loss.tolist() == pytest.approx([-1.28, 2.0])
    assert value(stats["train/kl_old"]) == pytest.approx(-math.log(2))
    assert value(stats["mismatch/logprob_abs_diff_max"]) == 0.0
    loss, stats = call(LOSS, old, old=old - 1, trainer_old=old)
    assert loss.tolist() == [-1.0, -1.0]
    assert value(stats["mismatch/logprob_abs_diff"]) == pytest.approx(1.0)


def independent(logp: float, old: float, a: float, low: float, high: float) -> float:
    """The same by cases (Spinning Up's g(epsilon, A)): the bound binds only where the step would overshoot."""
    r = math.exp(logp - old)
    return -min(r * a, ((1 + high) if a >= 0 else (1 - low)) * a)


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-3, 3)), min_size=1, max_size=20),
    low=st.floats(0.01, 1),
    high=st.floats(0.01, 3),
)
def test_matches_an_independent_expression(rows, low, high):
    logp, old, a = (torch.tensor(c, dtype=torch.float64) for c in zip(*rows, strict=True))
    loss, _ = call(ClippedLoss(clip_low=low, clip_high=high), logp, old=old, advantages=a)
    assert loss.tolist() == pytest.approx([independent(*row, low, high) for row in rows], rel=1e-9, abs=1e-12)


def test_gradient_by_finite_differences():
    g = torch.Generator().manual_seed(0)
    logp = -3 * torch.rand(64, generator=g, dtype=torch.float64)
    old = logp + 0.5 * torch.randn(64, generator=g, dtype=torch.float64)
    ratio = (logp - old).exp()
    near_a_kink = ((ratio - 0.8).abs() < 1e-3) | ((ratio - 1.28).abs() < 1e-3)
    advantages = torch.randn(64, generator=g, dtype=torch.float64)
    mask = (torch.rand(64, generator=g) < 0.8) & ~near_a_kink
    assert 0 < int(((ratio > 1.28) & mask).sum()) < int(mask.sum())

    def f(x):
        return call(LOSS, x, old=old, advantages=advantages, mask=mask)[0]

    assert torch.autograd.gradcheck(f, (logp.requires_grad_(),))


KL = ClippedLoss(clip_low=0.2, clip_high=0.28, kl_coefficient=0.5)


def test_the_reference_penalty_by_hand():
    """k3 of p_ref / p_train = 1, 2 and 1/4: r - 1 - log r; it is added to the policy loss, which is reported bare."""
    r = torch.tensor([1.0, 2.0, 0.25])
    logp = torch.tensor([-1.0, -2.0, -3.0])
    plain, bare = call(LOSS, logp, old=logp)
    loss, stats = call(KL, logp, old=logp, ref=logp + r.log())
    k3 = [0.0, 1 - math.log(2), -0.75 + math.log(4)]
    assert (loss - plain).tolist() == pytest.approx([0.5 * x for x in k3], rel=1e-6, abs=1e-7)
    assert value(stats["train/kl_ref"]) == pytest.approx(sum(k3) / 3, rel=1e-6)
    assert value(stats["train/pg_loss"]) == value(bare["train/pg_loss"])
    assert "train/kl_ref" not in bare


def test_the_penalty_s_mean_is_the_kl_divergence():
    """Weighted by the policy's own probabilities, k3 sums to torch's KL(train || ref): the estimator has no bias."""
    g = torch.Generator().manual_seed(1)
    train, ref = (torch.randn(50, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2))
    _, stats = call(KL, train, ref=ref)
    per_token = (call(KL, train, old=train, ref=ref)[0] - call(LOSS, train, old=train)[0]) / KL.kl_coefficient
    divergence = torch.nn.functional.kl_div(ref, train, reduction="sum", log_target=True)
    assert float((train.exp() * per_token).sum()) == pytest.approx(float(divergence), rel=1e-9)
    assert float(per_token.min()) >= 0 and value(stats["train/kl_ref"]) == pytest.approx(float(per_token.mean()))


def test_gradient_of_the_penalty_by_finite_differences():
    """And by its closed form, coefficient * (1 - p_ref / p_train); masked ones carry none, even where exp overflows."""
    g = torch.Generator().manual_seed(2)
    logp, ref = (-3 * torch.rand(32, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.arange(32) % 4 != 0
    ref[0] = 2000.0
    logp.requires_grad_()

    def f(x):
        return call(KL, x, advantages=torch.zeros(32), mask=mask, ref=ref)[0]

    assert torch.autograd.gradcheck(f, (logp,))
    f(logp).sum().backward()
    want = torch.where(mask, 0.5 * (1 - (ref - logp.detach()).exp()), 0.0)
    assert logp.grad is not None and torch.allclose(logp.grad, want, rtol=1e-12)


def test_coefficient_zero_changes_no_bit():
    """With a reference at hand or not: the loss is the one without a penalty, and only the divergence is reported."""
    g = torch.Generator().manual_seed(3)
    logp, old, ref, advantages = (torch.randn(64, generator=g) for _ in range(4))
    plain, bare = call(LOSS, logp, old=old, advantages=advantages)
    loss, stats = call(LOSS, logp, old=old, advantages=advantages, ref=ref)
    assert torch.equal(loss, plain)
    assert {k: value(v) for k, v in stats.items() if k != "train/kl_ref"} == {k: value(v) for k, v in bare.items()}


def test_a_penalty_without_a_reference_is_an_error():
    with refuses(AssertionError, "kl_coefficient", 0):
        call(KL, torch.zeros(2))
    with refuses(ValueError, "kl_coefficient", -1.0):
        ClippedLoss(clip_low=0.2, clip_high=0.28, kl_coefficient=-1.0)


def test_on_policy_gradient_is_the_policy_gradient():
    """At ratio 1 the gradient of the loss by log p is -A: the step that REINFORCE takes."""
    logp = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0])
    call(LOSS, logp, old=logp.detach().clone(), advantages=advantages)[0].sum().backward()
    assert logp.grad is not None and torch.equal(logp.grad, -advantages)


def test_what_is_masked_neither_counts_nor_carries_gradient():
    """Also where it would overflow: exp(200) on a masked position must not reach the sum or the gradient as nan."""
    logp = torch.tensor([-1.0, 0.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -200.0, -1.0])
    mask = torch.tensor([True, False, True])
    loss, stats = call(LOSS, logp, old=old, mask=mask, entropy=torch.tensor([1.0, 100.0, 3.0]))
    loss.sum().backward()
    assert loss.tolist() == [-1.0, 0.0, -1.0]
    assert logp.grad is not None and logp.grad.tolist() == [-1.0, 0.0, -1.0]
    assert value(stats["train/entropy"]) == 2.0
    assert value(stats["train/is_weight/max"]) == 1.0
    assert all(float(s.count) == (1 if "_sequence" in k else 2) for k, s in stats.items())


def test_a_nan_under_the_mask_is_not_hidden():
    loss, stats = call(LOSS, torch.tensor([float("nan"), 0.0]))
    assert loss.isnan().tolist() == [True, False]
    assert value(stats["mismatch/nan_frac"]) == 0.5


def test_a_batch_without_loss_tokens_gives_zeros():
    """The masked token of a rank without samples: its statistics must add nothing to the others'."""
    loss, stats = call(LOSS, torch.tensor([-1.0]), mask=torch.tensor([False]))
    assert loss.tolist() == [0.0]
    assert all(float(s.total) == 0 and float(s.count) == 0 for s in stats.values())


def test_statistics_are_scalars_without_gradient():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    for fn in (LOSS, NllLoss()):
        for s in call(fn, logp)[1].values():
            assert s.total.shape == s.count.shape == ()
            assert s.total.dtype == s.count.dtype == torch.float32
            assert not s.total.requires_grad


def test_losses_travel_to_other_processes():
    assert pickle.loads(pickle.dumps(LOSS)) == LOSS
    assert pickle.loads(pickle.dumps(NllLoss())) == NllLoss()


def test_bounds_that_make_no_sense_are_refused():
    with refuses(ValueError, "clip_low", 1.5):
        ClippedLoss(clip_low=1.5, clip_high=0.2)


def test_nll_and_the_probability_of_the_right_answer():
    """Three samples: probabilities 1/2 * 1/4, 1/8, and one without an answer, which is no sample to average over."""
    p = torch.tensor([0.9, 0.5, 0.25, 0.3, 0.125, 0.7])
    mask = torch.tensor([False, True, True, False, True, False])
    logp = p.log().requires_grad_()
    loss, stats = call(NllLoss(), logp, mask=mask, cu=[0, 3, 5, 6])
    assert value(stats["train/answer_prob"]) == pytest.approx(1 / 8)
    assert float(stats["train/answer_prob"].count) == 2
    assert value(stats["train/nll"]) == pytest.approx(math.log(64) / 3)
    loss.sum().backward()
    assert logp.grad is not None and logp.grad.tolist() == [0, -1, -1, 0, -1, 0]


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_sequence_sums_match_a_plain_loop(lengths, seed):
    g = torch.Generator().manual_seed(seed)
    t = sum(lengths)
    logp, mask = -torch.rand(t, generator=g), torch.rand(t, generator=g) < 0.5
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    sums = sequence_sums(logp, loss_mask=mask, cu_seqlens=cu)
    assert sums.dtype == torch.float64  # a long sample's mean must show 1e-4
    parts = list(zip(logp.split(lengths), mask.split(lengths), strict=True))
    assert sums.tolist() == pytest.approx([float(x[m].double().sum()) for x, m in parts])
    assert sequence_lengths(loss_mask=mask, cu_seqlens=cu).tolist() == [int(m.sum()) for _, m in parts]

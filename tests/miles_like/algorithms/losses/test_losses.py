"""Losses against closed forms and finite differences: what each kind makes of a ratio, and the terms they share.

A loss must be exactly the function its name says, as every trained weight depends on it; its gradient must be its own,
or what is trained is another. The clipped loss alone, masks and corrections: test_policy_loss.py, test_correction.py.
Equality with trl: test_trl.py. Not covered: the trainer's sum over micro-batches and ranks.
"""

from __future__ import annotations

import itertools
import math
import pickle
from pathlib import Path

import pytest
import torch
from ray import cloudpickle

from miles_like.algorithms.losses.cispo import CispoLoss
from miles_like.algorithms.losses.clipped import ClippedLoss
from miles_like.algorithms.losses.decoupled import behaviour_weights
from miles_like.algorithms.losses.reinforce import ReinforceLoss
from miles_like.algorithms.losses.sapo import SapoLoss
from miles_like.algorithms.losses.value import ValueLoss, critic_metrics
from miles_like.algorithms.registry import make_algorithm
from miles_like.algorithms.terms.kl import kl_estimate
from miles_like.algorithms.terms.mismatch import finish
from miles_like.config.sections.algorithm import AlgorithmConfig, RolloutAlgorithm
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.config.sections.flat import names_of, parts_of
from miles_like.report.console import step_line
from miles_like.types import REFERENCE, RETURNS, VALUES, LossInputs
from tests.support.refusals import refuses

LONG = pytest.mark.long(beside="tests/miles_like/algorithms/losses/test_losses.py")
LOSSES = names_of(parts_of(RolloutAlgorithm)["loss"])

BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
NOTHING = {k: torch.zeros(0) for k in ("logprobs", "entropy", "rollout_logprobs", "advantages")} | {
    "loss_mask": torch.zeros(0, dtype=torch.bool),
    "cu_seqlens": torch.zeros(1, dtype=torch.int32),
}
EVERYTHING = {"kl_coefficient": 0.3, "entropy_coefficient": 0.2, "off_policy_delta": 0.05}


def made(loss: str, **keys):
    return make_algorithm(AlgorithmConfig(loss=loss, **keys), CorrectionConfig()).loss


def call(loss, logprobs, **given):
    t = len(logprobs)
    zeros = torch.zeros(t, dtype=logprobs.dtype)
    rest = {
        "entropy": zeros,
        "rollout_logprobs": zeros,
        "advantages": zeros + 1,
        "loss_mask": torch.ones(t, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, t], dtype=torch.int32),
    }
    return loss(LossInputs(logprobs=logprobs, **(rest | given)))


def value(stat) -> float:
    return float(stat.total / stat.count) if stat.reduce == "mean" else float(stat.total)


def batch(seed: int = 0):
    """Three samples of 7, 1 and 12 tokens in fp64; the policy has moved, trainer and rollout differ."""
    g = torch.Generator().manual_seed(seed)
    new, noise = -3 * torch.rand(20, generator=g, dtype=torch.float64), torch.randn(4, 20, generator=g).double()
    old = new + 0.3 * noise[0]
    return new, {
        "rollout_logprobs": old + 0.2 * noise[1],
        "old_logprobs": old,
        "ref_logprobs": new + 0.5 * noise[2],
        "entropy": noise[3].abs(),
        "advantages": torch.tensor([1.3] * 7 + [-0.7] + [-0.4] * 12, dtype=torch.float64),
        "loss_mask": torch.arange(20) % 5 != 1,
        "cu_seqlens": torch.tensor([0, 7, 8, 20], dtype=torch.int32),
    }


KINDS = [k for k in LOSSES if k != "cispo"]
# of a kind, how its divergence is estimated: the terms are shared, so that each kind meets one and one kind meets all
ESTIMATES = list(itertools.product(KINDS, (False, True), ("k1", "k2", "k3", "abs")))
FIRST = [(k, u, e) for k, u, e in ESTIMATES if k == "clipped" or (u, e) == (True, "k3")]


@pytest.mark.parametrize(
    ("kind", "unbiased", "estimator"),
    [pytest.param(*case, marks=[] if case in FIRST else [LONG]) for case in ESTIMATES],
)
def test_gradient_by_finite_differences(kind, unbiased, estimator):
    """By log-probabilities and by entropy, with every shared term on; CISPO's weight is a constant by definition, see
    below. Off-policy masking is a constant where no mean is within a difference of its bound."""
    loss = made(kind, kl_estimator=estimator, kl_unbiased=unbiased, **EVERYTHING)
    for seed in range(2):
        new, rest = batch(seed)
        entropy = rest.pop("entropy").requires_grad_()
        new.requires_grad_()
        assert torch.autograd.gradcheck(lambda x, h, rest=rest: call(loss, x, entropy=h, **rest)[0], (new, entropy))


def test_cispo_by_hand():
    """A weight of at most 1.28 and at least 0.8 times A log p, and a gradient at every token, clipped or not."""
    ratio, a = torch.tensor([1.1, 2.0, 0.5, 2.0]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    logp = torch.tensor([-1.0, -2.0, -3.0, -0.5], requires_grad=True)
    old = logp.detach() - ratio.log()
    loss, stats = call(CispoLoss(**BOUNDS), logp, rollout_logprobs=old, old_logprobs=old, advantages=a)
    loss.sum().backward()
    weight = torch.tensor([1.1, 1.28, 0.8, 1.28])
    torch.testing.assert_close(loss.detach(), -weight * a * logp.detach())
    torch.testing.assert_close(logp.grad, -weight * a)
    assert value(stats["train/clip_frac/high"]) == 0.5 and value(stats["train/clip_frac/low"]) == 0.25


def test_sapo_by_hand():
    """At r = 1 the gradient is -A, as without a gate; at r = 3 it is less by 4 s (1 - s), more so where A < 0."""
    loss = SapoLoss(tau_pos=1.0, tau_neg=1.05)
    for ratio in (1.0, 3.0):
        logp = torch.full((2,), math.log(ratio), dtype=torch.float64, requires_grad=True)
        per_token, stats = call(loss, logp, advantages=torch.tensor([2.0, -2.0], dtype=torch.float64))
        per_token.sum().backward()
        gates = []
        for tau, got, a in ((1.0, per_token[0], 2.0), (1.05, per_token[1], -2.0)):
            s = 1 / (1 + math.exp(-tau * (ratio - 1)))
            assert float(got) == pytest.approx(-4 * s / tau * a)
            gates.append(4 * s * (1 - s))
        assert logp.grad.tolist() == pytest.approx([-2 * gates[0] * ratio, 2 * gates[1] * ratio])
        assert value(stats["train/gate/mean"]) == pytest.approx(sum(gates) / 2)
        assert gates == [1.0, 1.0] if ratio == 1.0 else 1 > gates[0] > gates[1]


def test_dual_clip_by_hand():
    """A bad sample's surrogate is no less than 3 A, and beyond it has no gradient; a good one's is as without."""
    ratio, a = torch.tensor([2.0, 4.0, 4.0]), torch.tensor([-1.0, -1.0, 1.0])
    logp = ratio.log().requires_grad_()
    loss, stats = call(ClippedLoss(**BOUNDS, clip_dual=3.0), logp, advantages=a)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([2.0, 3.0, -1.28]) and logp.grad.tolist() == pytest.approx([2.0, 0.0, 0.0])
    assert value(stats["train/clip_frac/dual"]) == pytest.approx(1 / 3)
    with refuses(ValueError, "clip_dual", 1.2, 1, "clip_high", 1.28):
        ClippedLoss(**BOUNDS, clip_dual=1.2)


def test_decoupled_by_hand():
    """p_train 0.6, p_prox 0.5; behaviour 0.4 weighs 1.25, behaviour 0.05 would weigh 10 > 5 and is left out."""
    new, prox = torch.full((2,), math.log(0.6)), torch.full((2,), math.log(0.5))
    rollout = torch.tensor([0.4, 0.05]).log()
    loss, stats = call(
        ClippedLoss(**BOUNDS, correction=behaviour_weights(5.0)), new, rollout_logprobs=rollout, old_logprobs=prox
    )
    assert loss.tolist() == pytest.approx([-1.2 * 1.25, 0.0])
    assert value(stats["train/is_weight/mask_frac"]) == 0.5
    with refuses(ValueError, "behaviour_cap", 0.5):
        behaviour_weights(0.5)


def test_reinforce_by_hand():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, _ = call(ReinforceLoss(), logp, advantages=torch.tensor([1.0, -2.0]))
    loss.sum().backward()
    assert loss.tolist() == [1.0, -4.0] and logp.grad.tolist() == [-1.0, 2.0]


@pytest.mark.parametrize("kind", LOSSES)
def test_on_policy_they_are_all_the_policy_gradient(kind):
    """Where nothing has moved every kind's gradient is -A: they differ only in what becomes of old samples, and in
    tokens of large covariance, of which Clip-Cov trains none."""
    keys = {"cov_low": 4.0} if kind == "clip_cov" else {}
    logp = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    cu = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    call(made(kind, **keys), logp, rollout_logprobs=logp.detach().clone(), advantages=a, cu_seqlens=cu)[
        0
    ].sum().backward()
    torch.testing.assert_close(logp.grad, -a)


def distributions():
    """Two of 50 outcomes, fp64: log p with a gradient by its logits, and log q."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(50, generator=g, dtype=torch.float64, requires_grad=True)
    return logits, torch.randn(50, generator=g, dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize(("estimator", "exact"), [("k1", True), ("k2", False), ("k3", True)])
def test_means_of_the_estimators(estimator, exact):
    """Weighted by the policy's own probabilities k1 and k3 sum to KL(policy || reference); k2 does not."""
    logits, ref = distributions()
    logp = logits.detach().log_softmax(0)
    want = torch.nn.functional.kl_div(ref, logp, reduction="sum", log_target=True)
    got = (logp.exp() * kl_estimate(ref - logp, estimator)).sum()
    assert (abs(float(got - want)) < 1e-12) is exact


@pytest.mark.parametrize(
    ("estimator", "unbiased", "pulls"),
    [("k1", False, "nowhere"), ("k2", False, "kl"), ("k3", False, "other"), ("k1", True, "kl"), ("k3", True, "kl")],
)
def test_where_the_penalty_pulls(estimator, unbiased, pulls):
    """The mean gradient over the policy's samples: k1 in the loss has none, k2 has KL's, k3 that of KL(ref || policy);
    times p / p_sampled both k1 and k3 have KL's."""
    logits, ref = distributions()
    logp = logits.log_softmax(0)
    sampled = logp.detach()
    loss = ReinforceLoss(kl_coefficient=1.0, kl_estimator=estimator, kl_unbiased=unbiased)
    none = torch.zeros(50, dtype=torch.float64)
    per_token, _ = call(loss, logp, rollout_logprobs=sampled, advantages=none, ref_logprobs=ref)
    (got,) = torch.autograd.grad((sampled.exp() * per_token).sum(), logits, retain_graph=True)
    forward = (logp.exp() * (logp - ref)).sum()
    other = -(ref.exp() * logp).sum()
    want = {"nowhere": 0 * forward, "kl": forward, "other": other}[pulls]
    torch.testing.assert_close(got, torch.autograd.grad(want, logits)[0], rtol=1e-9, atol=1e-12)


def test_the_entropy_bonus():
    """Less loss for more entropy, at tokens under loss alone; reported bare."""
    new, rest = batch()
    entropy = rest["entropy"].requires_grad_()
    bare, _ = call(made("clipped"), new, **rest)
    loss, stats = call(made("clipped", entropy_coefficient=0.5), new, **rest)
    mask = rest["loss_mask"]
    torch.testing.assert_close(bare - loss, torch.where(mask, 0.5 * entropy, 0.0))
    loss.sum().backward()
    assert entropy.grad.tolist() == torch.where(mask, -0.5, 0.0).tolist()
    torch.testing.assert_close(torch.tensor(value(stats["train/entropy"])), entropy[mask].mean().detach().float())
    with refuses(AssertionError, "entropy"):
        call(made("clipped", entropy_coefficient=0.5), new.requires_grad_(), **(rest | {"entropy": entropy.detach()}))


def test_off_policy_samples_are_masked_where_they_were_bad():
    """Mean of log p_rollout - log p_train: 0.5, 0.5, -1 and not a number; only the first is bad and far."""
    rollout = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, math.nan])
    new = torch.tensor([-2.0, -1.0, -1.5, -0.0, -9.0, -1.0])
    a = torch.tensor([-1.0, -1.0, 1.0, -1.0, -1.0, -1.0])
    cu, mask = torch.tensor([0, 2, 3, 5, 6], dtype=torch.int32), torch.tensor([True] * 4 + [False, True])
    given = {"rollout_logprobs": rollout, "advantages": a, "cu_seqlens": cu, "loss_mask": mask, "old_logprobs": new}
    bare, _ = call(ClippedLoss(**BOUNDS), new, **given)
    loss, stats = call(ClippedLoss(**BOUNDS, off_policy_delta=0.4), new, **given)
    assert loss.tolist() == [0.0, 0.0, *bare[2:].tolist()]
    assert value(stats["train/off_policy/mask_frac"]) == pytest.approx(2 / 5)
    assert value(stats["train/off_policy/mask_sequence_frac"]) == pytest.approx(1 / 4)


def test_a_stream_of_the_reference_is_told_and_not_penalized():
    """In the reward it is taken off there; the loss only reports how far the policy is."""
    new, rest = batch()
    ref = rest.pop("ref_logprobs")
    bare, none = call(made("clipped"), new, **rest)
    loss, stats = call(made("clipped"), new, streams={REFERENCE: ref}, **rest)
    assert torch.equal(loss, bare) and "train/kl_ref" not in none
    assert value(stats["train/kl_ref"]) > 0


VALUE = {"streams": {VALUES: torch.tensor([1.0, 1.0, 1.0]), RETURNS: torch.tensor([2.0, 2.0, 0.9])}}


def test_the_value_loss_by_hand():
    """Old value 1, clip 0.2. Nearer to the return by more than the clip: no gradient; away from it: the whole error."""
    values = torch.tensor([1.5, 0.5, 1.1], requires_grad=True)
    loss, stats = call(ValueLoss(value_clip=0.2), values, **VALUE)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.8**2 / 2, 1.5**2 / 2, 0.2**2 / 2])
    assert values.grad.tolist() == pytest.approx([0.0, -1.5, 0.2])
    assert value(stats["critic/clip_frac"]) == pytest.approx(1 / 3)
    got = critic_metrics({k: value(s) for k, s in stats.items()} | {"train/grad_norm": 2.0, "train/loss": 1.0})
    returns, errors = VALUE["streams"][RETURNS], torch.tensor([0.5, 1.5, 0.2])
    assert got.pop("critic/explained_variance") == pytest.approx(
        1 - float(errors.square().mean()) / float(returns.var(unbiased=False)), rel=1e-4
    )
    names = ("loss", "clip_frac", "value/mean", "return/mean", "grad_norm")
    assert set(got) == {f"critic/{name}" for name in names}
    with refuses(ValueError, "value_clip", 0.0):
        ValueLoss(value_clip=0.0)


def test_gradient_of_the_value_loss_by_finite_differences():
    g = torch.Generator().manual_seed(0)
    new, old, returns = torch.randn(3, 30, generator=g, dtype=torch.float64)
    streams = {VALUES: old, RETURNS: returns}
    mask = torch.arange(30) % 4 != 0
    new.requires_grad_()
    loss = ValueLoss(value_clip=0.3)
    assert torch.autograd.gradcheck(lambda v: call(loss, v, streams=streams, loss_mask=mask)[0], (new,))


def own_loss(
    *, logprobs, entropy, rollout_logprobs, advantages, loss_mask, cu_seqlens, ref_logprobs, old_logprobs, streams,
    candidate_logprobs,
):  # fmt: skip
    return -advantages * logprobs, {}


def own_loss_of_inputs(inputs):
    return -inputs.advantages * inputs.logprobs, {}


def own_loss_of_either(*args, **keywords):
    assert not args
    return own_loss(**keywords)


def own_advantage(groups):
    return [[7.0] * len(g.samples) for g in groups]


def test_parts_of_one_s_own():
    """By import path, held to their Protocols; a module's function is pickled by its name."""
    algorithm = make_algorithm(
        AlgorithmConfig(
            loss="tests.miles_like.algorithms.losses.test_losses:own_loss", advantage=f"{__file__}:own_advantage"
        ),
        CorrectionConfig(),
    )
    assert algorithm.advantages([]) == []
    assert pickle.loads(pickle.dumps(algorithm.loss)) == algorithm.loss
    with refuses(ValueError, "algorithm.loss", "test_losses.py:own_advantage", "LossFn"):
        make_algorithm(AlgorithmConfig(loss=f"{__file__}:own_advantage"), CorrectionConfig())


@pytest.mark.parametrize("name", ["own_loss", "own_loss_of_inputs", "own_loss_of_either"])
def test_a_loss_of_one_s_own_reports_the_mismatch_too(name):
    """The figures of a built-in loss of the same batch, on the console as well; the loss stays the user's. It may have
    the ten keywords that LossFn had, and one that takes anything is called with those."""
    own = make_algorithm(AlgorithmConfig(loss=f"{__file__}:{name}"), CorrectionConfig()).loss
    assert pickle.loads(cloudpickle.dumps(own))(LossInputs(**NOTHING))[0].shape == (0,)
    new, rest = batch()
    builtin = dict(call(made("clipped"), new, **rest)[1])
    loss, stats = call(own, new, **rest)
    assert torch.equal(loss, -rest["advantages"] * new)
    wanted = {k: value(s) for k, s in builtin.items() if k.startswith("mismatch/")}
    assert len(wanted) > 10 and {k: value(s) for k, s in stats.items()} == wanted
    row = {"step": 1.0, **finish({k: value(s) for k, s in stats.items()})}
    assert f"mismatch kl {wanted['mismatch/kl']:.1e}" in "".join(step_line([row], steps=1, verbose=True))


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_travel_to_other_processes(kind):
    assert pickle.loads(pickle.dumps(made(kind))) == made(kind)


def test_figures_that_make_no_sense_are_refused():
    for wrong, facts in (
        ({"kl_coefficient": -1.0}, ("kl_coefficient",)),
        ({"entropy_coefficient": -1.0}, ("entropy_coefficient",)),
    ):
        with refuses(ValueError, *facts):
            ReinforceLoss(**wrong)
    with refuses(ValueError, "tau_neg", 0.0):
        SapoLoss(tau_pos=1.0, tau_neg=0.0)
    with refuses(ValueError, "clip_low", 2.0):
        CispoLoss(clip_low=2.0, clip_high=1.0)


def test_every_figure_is_documented():
    page = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    new, rest = batch()
    stats = dict(call(ValueLoss(value_clip=0.2), new[:3].float(), **VALUE)[1])
    keys = set(critic_metrics({k: value(s) for k, s in stats.items()} | {"train/lr": 1.0, "train/grad_norm": 1.0}))
    rest["entropy"].requires_grad_()
    for kind in LOSSES:
        dual = {"clip_dual": 3.0} if kind in ("clipped", "gspo", "decoupled") else {}
        keys |= set(call(made(kind, **EVERYTHING, **dual), new, **rest)[1])
    missing = [k for k in keys if f"`{k}`" not in page and not k.startswith("mismatch/rho")]
    assert not missing

"""Weights against the mismatch: closed forms, a plain numpy loop, and gradients by finite differences.

A wrong weight trains another objective than its name says and no loss curve shows it. The loop below is written from
the definitions, sample by sample and without a mask, as verl and Miles have them; their code is not run here. Not
covered: that a correction helps a run.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from miles_like.algorithms.losses.clipped import ClippedLoss
from miles_like.algorithms.losses.gspo import GspoLoss
from miles_like.algorithms.registry import make_algorithm, make_correction
from miles_like.algorithms.terms.correction import Correction
from miles_like.algorithms.terms.mismatch import finish
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.config.sections.correction import BOUNDS_OF, CorrectionConfig
from miles_like.types import LossInputs
from tests.support.refusals import Facts, refuses

NAN, INF = float("nan"), float("inf")
KINDS = [CorrectionConfig(kind=kind, level=level, action=action) for kind, level, action in BOUNDS_OF]
IDS = ["-".join(key) for key in BOUNDS_OF]
TIS = CorrectionConfig(kind="tis")


def weigh(config, ratio, *, mask=None, cu=None):
    """Weights of tokens whose p_old / p_rollout is `ratio`, and the statistics' values."""
    delta = torch.tensor(ratio, dtype=torch.float64).log()
    mask = torch.ones(len(delta), dtype=torch.bool) if mask is None else torch.tensor(mask)
    correction = make_correction(config)
    assert correction is not None
    weight, stats = correction.weights(
        old_logprobs=delta - 1,
        rollout_logprobs=torch.full_like(delta, -1.0),
        loss_mask=mask,
        cu_seqlens=torch.tensor([0, len(delta)] if cu is None else cu, dtype=torch.int32),
    )
    got = {k: float(s.total / s.count) if s.reduce == "mean" else float(s.total) for k, s in stats.items()}
    return weight.tolist(), {k.removeprefix("train/is_weight/"): v for k, v in got.items()}


def test_tis_cuts_off_above():
    weight, stats = weigh(TIS, [0.1, 1.0, 1.9, 3.0], cu=[0, 3, 4])
    assert weight == pytest.approx([0.1, 1.0, 1.9, 2.0])
    assert stats == pytest.approx(
        {
            "mean": 5 / 4,
            "max": 2.0,
            "min": 0.1,
            "mask_frac": 0.0,
            "mask_sequence_frac": 0.0,
            "trunc_frac": 0.25,
            "trunc_sequence_frac": 0.5,
        }
    )


def test_cis_cuts_off_on_both_sides():
    weight, stats = weigh(CorrectionConfig(kind="tis", low=0.5), [0.1, 1.0, 3.0])
    assert weight == pytest.approx([0.5, 1.0, 2.0]) and stats["trunc_frac"] == pytest.approx(2 / 3)


def test_icepop_keeps_the_ratio_inside_and_nothing_outside():
    weight, stats = weigh(CorrectionConfig(kind="icepop"), [0.49, 0.51, 1.0, 4.9, 5.1, 1e-9], cu=[0, 2, 4, 6])
    assert weight == pytest.approx([0, 0.51, 1, 4.9, 0, 0])
    assert stats["mask_frac"] == 0.5 and stats["mask_sequence_frac"] == pytest.approx(2 / 3)
    assert "trunc_frac" not in stats and "veto_sequence_frac" not in stats


def test_mis_masks_tokens_and_vetoes_samples():
    """The second sample has one token below 1e-4: all of it goes, also what is inside the bounds."""
    weight, stats = weigh(CorrectionConfig(kind="mis"), [0.4, 1.5, 2.1, 1.0, 9e-5, 1.0], cu=[0, 3, 6])
    assert weight == pytest.approx([0, 1.5, 0, 0, 0, 0])
    assert stats["mask_frac"] == pytest.approx(5 / 6) and stats["veto_sequence_frac"] == 0.5
    assert weigh(CorrectionConfig(kind="mis", veto=0), [1.0, 9e-5])[0] == pytest.approx([1.0, 0.0])


def test_sequence_level_is_the_product():
    """1.5 * 1.2 = 1.8 stays, 1.5 * 1.5 = 2.25 goes or becomes 2; tokens outside the mask are no factors."""
    ratio, cu = [1.5, 1.2, 1.5, 7.0, 1.5], [0, 2, 5]
    mask = [True, True, True, False, True]
    of = {"kind": "mis", "level": "sequence"}
    assert weigh(CorrectionConfig(**of), ratio, mask=mask, cu=cu)[0] == pytest.approx([1.8, 1.8, 0, 0, 0])
    cut = CorrectionConfig(**of, action="truncate")
    assert weigh(cut, ratio, mask=mask, cu=cu)[0] == pytest.approx([1.8, 1.8, 2, 0, 2])
    huge = CorrectionConfig(**of, action="truncate", high=1e12)
    assert weigh(huge, [1e6] * 3)[0] == pytest.approx([math.exp(20)] * 3)


def test_geometric_level_does_not_grow_with_length():
    """A ratio of 1.0009 at each of 1000 tokens: their product is 2.46 and out, their geometric mean is in."""
    geometric = CorrectionConfig(kind="mis", level="geometric")
    assert weigh(geometric, [1.0009] * 1000)[0] == pytest.approx([1.0009] * 1000)
    assert set(weigh(CorrectionConfig(kind="mis", level="sequence"), [1.0009] * 1000)[0]) == {0.0}
    assert weigh(geometric, [1.01, 1.0], cu=[0, 1, 2])[0] == [0.0, 1.0]


def test_k3_level_only_decides():
    """Mean of r - 1 - ln r: 0.0048 for (1.1, 1.0 ...) of two, 0.307 for 2.0."""
    k3 = CorrectionConfig(kind="mis", level="k3")
    assert weigh(k3, [1.1, 1.1, 2.0, 1.0, 1.0], cu=[0, 2, 3, 5])[0] == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert weigh(CorrectionConfig(kind="mis", level="k3", high=0.004), [1.1, 1.1])[0] == [0.0, 0.0]
    # of the rollout to the trainer, not the other way round: 0.0103 for 1.15, 0.0094 for 1 / 1.15
    assert weigh(k3, [1.1503, 1 / 1.1503], cu=[0, 1, 2])[0] == [0.0, 1.0]


def by_hand(key, low, high, veto, samples):
    """[(log ratio, under loss)] of each sample -> its weights, in numpy."""
    _, level, action = key
    out = []
    for sample in samples:
        d = np.array([x for x, m in sample if m], dtype=float)
        ratio = np.exp(d)
        if level == "token":
            rho = ratio
        elif level == "sequence":
            rho = np.full(len(d), np.exp(np.clip(np.log(ratio).sum(), -20, 20)))
        elif level == "geometric":
            rho = np.full(len(d), np.prod(ratio) ** (1 / max(len(d), 1)))
        else:
            rho = np.full(len(d), (ratio - 1 - d).sum() / max(len(d), 1))
        w = (
            np.minimum(np.maximum(rho, low), high)
            if action == "truncate"
            else np.where((low <= rho) & (rho <= high), rho, 0)
        )
        if level == "k3":
            w = (rho <= high).astype(float)
        if veto and len(d) and ratio.min() < veto:
            w = 0 * w
        it = iter(w)
        out += [float(next(it)) if m else 0.0 for _, m in sample]
    return out


tokens = st.lists(
    st.tuples(st.sampled_from([-12.0, -1.2, -0.3, -1e-4, 0.0, 5e-4, 0.13, 0.9, 1.7]), st.booleans()),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("config", KINDS, ids=IDS)
@settings(deadline=None, max_examples=15)
@given(samples=st.lists(tokens, min_size=1, max_size=5))
def test_every_kind_is_the_plain_loop(config, samples):
    flat = [x for sample in samples for x in sample]
    cu = np.cumsum([0, *map(len, samples)]).tolist()
    got, stats = weigh(config, [math.exp(d) for d, _ in flat], mask=[m for _, m in flat], cu=cu)
    of = config.weights
    want = by_hand((of.kind, of.level, of.action), of.low, of.high, of.veto, samples)
    assert got == pytest.approx(want, rel=1e-9, abs=1e-12)
    if any(m for _, m in flat):
        chosen = [w for w, (_, m) in zip(want, flat, strict=True) if m]
        assert [stats["mean"], stats["max"], stats["min"]] == pytest.approx([np.mean(chosen), max(chosen), min(chosen)])
        if of.action == "mask":
            assert stats["mask_frac"] == pytest.approx(np.mean([w == 0 for w in chosen]))


@pytest.mark.parametrize("config", KINDS, ids=IDS)
def test_a_nan_under_the_mask_is_a_nan_loss(config):
    """No bound and no veto may turn it into 0: a token dropped for its unknown ratio would go unnoticed. Its neighbours
    in other samples are unharmed."""
    loss = make_algorithm(AlgorithmConfig(), config).loss
    for bad in (NAN, INF, -INF):
        rollout = torch.tensor([bad, -1.0, -1.0])
        value, stats = run(loss, torch.tensor([-1.0, -14.0, -1.0]), rollout=rollout, cu=[0, 2, 3])
        assert value[0].isnan() and value[2] == -1.0
        assert float(stats["mismatch/nan_count"].total) == 1
    value, _ = run(loss, torch.tensor([-1.0, NAN]), rollout=torch.tensor([-1.0, -1.0]), cu=[0, 1, 2])
    assert value[0] == -1.0 and value[1].isnan()


def run(loss, logprobs, *, rollout, old=None, advantages=None, mask=None, cu=None, entropy=None):
    t = len(logprobs)
    return loss(
        LossInputs(
            logprobs=logprobs,
            entropy=torch.zeros(t) if entropy is None else entropy,
            rollout_logprobs=rollout,
            advantages=torch.ones(t) if advantages is None else advantages,
            loss_mask=torch.ones(t, dtype=torch.bool) if mask is None else mask,
            cu_seqlens=torch.tensor([0, t] if cu is None else cu, dtype=torch.int32),
            ref_logprobs=None,
            old_logprobs=old,
        )
    )


LOSSES = [(name, config) for name in ("grpo", "gspo") for config in (CorrectionConfig(), *KINDS)]
LOSS_IDS = [f"{name}-{i}" for name in ("grpo", "gspo") for i in ("off", *IDS)]


def batch(seed, *, dtype=torch.float64):
    """Three samples of 7, 1 and 12 tokens, some outside the mask; trainer, old policy and rollout differ."""
    g = torch.Generator().manual_seed(seed)
    new = -3 * torch.rand(20, generator=g, dtype=dtype)
    old = new + 2e-4 * torch.randn(20, generator=g, dtype=dtype)
    rollout = old + 5e-4 * torch.randn(20, generator=g, dtype=dtype)
    old[3], rollout[5] = old[3] - 0.5, rollout[5] + 1.0  # one token moved far, one far apart between the two sides
    advantages = torch.tensor([1.3] * 7 + [-0.7] + [0.4] * 12, dtype=dtype)
    mask = torch.arange(20) % 5 != 1
    return new, {"rollout": rollout, "old": old, "advantages": advantages, "mask": mask, "cu": [0, 7, 8, 20]}


@pytest.mark.parametrize("name, config", LOSSES, ids=LOSS_IDS)
def test_gradient_by_finite_differences(name, config):
    """Weights are constants: old log-probabilities are given, so nothing but the ratio moves."""
    loss = make_algorithm(AlgorithmConfig(name=name), config).loss
    new, rest = batch(0)
    assert torch.autograd.gradcheck(lambda x: run(loss, x, **rest)[0], (new.requires_grad_(),), eps=1e-7)


def test_weights_carry_no_gradient():
    """With one step a rollout p_old is p_train itself: the gradient is still -w A, not that of w times the ratio."""
    loss = make_algorithm(AlgorithmConfig(), TIS).loss
    ratio = torch.tensor([0.5, 1.5, 4.0])
    logp = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    value, stats = run(loss, logp, rollout=logp.detach() - ratio.log(), advantages=torch.tensor([1.0, -1.0, 2.0]))
    value.sum().backward()
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx([-0.5, 1.5, -4.0])
    assert float(stats["train/is_weight/mean"].total) == pytest.approx(4.0)
    assert float(stats["train/clip_frac/high"].total) == 0
    sides = {"rollout_logprobs": torch.zeros(3), "loss_mask": torch.ones(3, dtype=torch.bool)}
    weight, _ = loss.correction.weights(old_logprobs=logp, cu_seqlens=torch.tensor([0, 3], dtype=torch.int32), **sides)
    assert not weight.requires_grad


def test_who_the_old_policy_is():
    """Ratio and weight of one token in the three cases: p_train 0.6, p_old 0.5, p_rollout 0.4."""
    new, old, rollout = (torch.tensor([math.log(p)]) for p in (0.6, 0.5, 0.4))
    wide = {"clip_low": 0.9, "clip_high": 9.0}
    plain, tis = ClippedLoss(**wide), ClippedLoss(**wide, correction=make_correction(TIS))

    def value(loss, old):
        got, stats = run(loss, new, rollout=rollout, old=old)
        return float(-got), float(stats["mismatch/logprob_abs_diff"].total)

    assert value(tis, old) == pytest.approx((0.6 / 0.5 * 0.5 / 0.4, math.log(5 / 4)))
    assert value(tis, None) == pytest.approx((0.6 / 0.4, math.log(3 / 2)))
    assert value(plain, old) == pytest.approx((0.6 / 0.5, math.log(5 / 4)))
    assert value(plain, None) == pytest.approx((0.6 / 0.4, math.log(3 / 2)))


def test_gspo_by_hand():
    """s = sqrt(1.0004 * 1.0002), inside; one sample clipped above with A > 0, one below with A < 0."""
    loss = make_algorithm(AlgorithmConfig(name="gspo"), CorrectionConfig()).loss
    ratio = torch.tensor([1.0004, 1.0002, 1.002, 1.0, 0.99, 0.7], dtype=torch.float64)
    new = (ratio.log() - 1).requires_grad_()
    mask = torch.tensor([True] * 5 + [False])
    advantages = torch.tensor([2.0, 2.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    old = torch.full_like(ratio, -1.0)
    value, stats = run(loss, new, rollout=old, old=old, advantages=advantages, mask=mask, cu=[0, 2, 4, 6])
    s = math.sqrt(1.0004 * 1.0002)
    assert value.tolist() == pytest.approx([-2 * s, -2 * s, -1.0004, -1.0004, 0.9997, 0], rel=1e-12)
    assert float(stats["train/clip_frac/high"].total) == 2 and float(stats["train/clip_frac/low"].total) == 1
    value.sum().backward()
    # d/dlogp_t of |y| s A, s the geometric mean: s A at every token of the sample
    assert new.grad is not None and new.grad.tolist() == pytest.approx([-2 * s, -2 * s, 0, 0, 0, 0], rel=1e-12)


def test_gspo_of_one_token_is_grpo():
    new, rest = batch(0)
    rest["cu"] = list(range(21))
    pair = [kind(clip_low=0.2, clip_high=0.28) for kind in (ClippedLoss, GspoLoss)]
    a, b = (run(loss, new, **rest)[0] for loss in pair)
    assert torch.equal(a, b)


@pytest.mark.parametrize("name, config", LOSSES, ids=LOSS_IDS)
@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_what_is_outside_the_mask_changes_nothing(name, config, junk):
    """Not a bit of loss, gradient or statistic: prompts and tools' tokens have whatever log-probabilities they have."""
    loss = make_algorithm(AlgorithmConfig(name=name), config).loss
    results = []
    for outside in (0.0, junk):
        new, rest = batch(0, dtype=torch.float32)
        off = ~rest["mask"]
        entropy = torch.where(off, outside, 1.0)
        for key in ("rollout", "old", "advantages"):
            rest[key] = torch.where(off, outside, rest[key])
        new = torch.where(off, outside, new).requires_grad_()
        value, stats = run(loss, new, entropy=entropy, **rest)
        value.sum().backward()
        results.append(
            [value.tolist(), new.grad.tolist(), {k: (float(s.total), float(s.count)) for k, s in stats.items()}]
        )
    assert results[0] == results[1]


def test_every_figure_is_documented():
    page = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    for _, config in LOSSES:
        new, rest = batch(0)
        _, stats = run(make_algorithm(AlgorithmConfig(), config).loss, new, **rest)
        for key in finish(dict.fromkeys(stats, 1.0)):
            assert f"`{key}`" in page, key


def test_defaults_are_filled_in_and_shown():
    assert CorrectionConfig().model_dump(exclude_none=True) == {"kind": "off"}
    for key, config in zip(BOUNDS_OF, KINDS, strict=True):
        assert (config.weights.low, config.weights.high, config.weights.veto) == BOUNDS_OF[key]
        assert CorrectionConfig(**config.model_dump()) == config
    assert CorrectionConfig(kind="mis", level="sequence").weights.action == "mask"
    assert CorrectionConfig(kind="icepop", high=3).model_dump() == {
        "kind": "icepop",
        "level": "token",
        "action": "mask",
        "low": 0.5,
        "high": 3.0,
        "veto": 0.0,
    }
    gspo = AlgorithmConfig(name="gspo", clip_high=1e-3).parts.loss
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 1e-3)
    assert AlgorithmConfig() == AlgorithmConfig(clip_low=0.2, clip_high=0.28)


@pytest.mark.parametrize(
    "given, facts",
    [
        ({"low": 0.5}, ("correction.low", 0.5, "correction.kind", "off")),
        ({"kind": "tis", "level": "sequence"}, ("mis",)),
        ({"kind": "icepop", "action": "truncate"}, ("correction.kind", "icepop", "token")),
        ({"kind": "mis", "level": "k3", "action": "truncate"}, ("k3",)),
        ({"kind": "mis", "level": "k3", "low": 0.1}, ("correction.low", 0.1, "k3")),
        ({"kind": "tis", "high": 0.9}, (0.9, 1.0)),
        ({"kind": "mis", "low": 1.2}, ("correction.low", 1.2, 2.0, 1.0)),
        ({"kind": "mis", "low": 1, "high": 1}, ("correction.low", "correction.high", 1.0)),
        ({"kind": "mis", "veto": 1.0}, ("veto", 1)),
        ({"kind": "cis"}, ("off", "tis", "mis", "icepop")),
    ],
)
def test_what_makes_no_sense_is_refused(given, facts: Facts):
    with refuses(ValidationError, *facts):
        CorrectionConfig(**given)


def test_a_corrected_loss_travels_to_other_processes():
    loss = make_algorithm(AlgorithmConfig(), CorrectionConfig(kind="mis")).loss
    assert pickle.loads(pickle.dumps(loss)) == loss
    assert loss.correction == Correction(level="token", action="mask", low=0.5, high=2.0, veto=1e-4)

"""Mismatch statistics on hand-made log-probabilities.

A metric that reads 0 for a broken alignment is worse than none, so each is checked for its value, for moving by one
unit in the last place, and for not swallowing nan. Not covered: the reduction over ranks, which the trainer does.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.algorithms.terms.mismatch import finish, mismatch_stats
from miles_like.types import Reduce, Stat

NAN, INF = float("nan"), float("inf")


def measure(delta, mask=None, cu=None, old=-1.0) -> dict[str, float]:
    return finish({k: value(s) for k, s in stats(delta, mask, cu, old).items() if s.count})


def stats(delta, mask=None, cu=None, old=-1.0) -> dict[str, Stat]:
    d = torch.tensor(delta)
    m = torch.ones(len(d), dtype=torch.bool) if mask is None else torch.tensor(mask)
    rollout = torch.full_like(d, old)
    bounds = torch.tensor([0, len(d)] if cu is None else cu, dtype=torch.int32)
    return mismatch_stats(old_logprobs=rollout + d, rollout_logprobs=rollout, loss_mask=m, cu_seqlens=bounds)


def value(s: Stat) -> float:
    return float(s.total / s.count) if s.reduce is Reduce.MEAN else float(s.total)


def test_hand_made_deltas():
    """delta = ln 3, -ln 3 | 0, ln 2 in two samples: rho = 3, 1/3 | 1, 2 and rho of the samples = 1, 2."""
    a, b = math.log(3), math.log(2)
    got = measure([a, -a, 0.0, b], cu=[0, 2, 4], old=math.log(0.2))
    rho = [3, 1 / 3, 1, 2]
    assert got == pytest.approx(
        {
            "mismatch/logprob_abs_diff": (2 * a + b) / 4,
            "mismatch/logprob_abs_diff_max": a,
            "mismatch/prob_abs_diff": (0.4 + 0.2 * 2 / 3 + 0 + 0.2) / 4,
            "mismatch/k1": -b / 4,
            "mismatch/k2": (2 * a * a + b * b) / 8,
            "mismatch/kl": ((3 - 1 - a) + (1 / 3 - 1 + a) + (2 - 1 - b)) / 4,
            "mismatch/extreme_frac": 0.5,
            "mismatch/extreme_count": 2.0,
            "mismatch/nan_frac": 0.0,
            "mismatch/nan_count": 0.0,
            "mismatch/ess": sum(rho) ** 2 / (4 * sum(r * r for r in rho)),
            "mismatch/ess_sequence": 9 / 10,
            "mismatch/chi2": sum(r * r for r in rho) / 4 - 1,
            "mismatch/chi2_sequence": 1.5,
        },
        rel=1e-5,
        abs=1e-7,
    )


def test_equal_log_probs_give_exact_zeros():
    got = measure([0.0, 0.0, 0.0], cu=[0, 1, 3])
    assert got.pop("mismatch/ess") == got.pop("mismatch/ess_sequence") == 1.0
    assert set(got.values()) == {0.0}


def test_one_unit_in_the_last_place_moves_it():
    old = torch.tensor([-1.0, -0.5])
    new = torch.nextafter(old, torch.zeros(2))
    everywhere, cu = torch.ones(2, dtype=torch.bool), torch.tensor([0, 2], dtype=torch.int32)
    got = mismatch_stats(old_logprobs=new, rollout_logprobs=old, loss_mask=everywhere, cu_seqlens=cu)
    for name in ("logprob_abs_diff", "logprob_abs_diff_max", "k2"):
        assert value(got[f"mismatch/{name}"]) > 0, name
    assert value(got["mismatch/k1"]) < 0


@settings(deadline=None)
@given(
    rows=st.lists(st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=6)
)
def test_matches_the_definitions_in_double(rows):
    """numpy, sample by sample, against sums over a pack."""
    flat = [x for row in rows for x in row]
    cu = np.cumsum([0, *map(len, rows)]).tolist()
    if not any(m for _, m in flat):
        return
    got = measure([d for d, _ in flat], [m for _, m in flat], cu)
    d = np.float32([x for x, m in flat if m]).astype(float)
    of_samples = [np.float32([x for x, m in row if m]).astype(float) for row in rows]
    log_w = np.clip([s.sum() for s in of_samples if len(s)], -20, 20)
    close = {"rel": 1e-4, "abs": 1e-6}
    assert got["mismatch/k1"] == pytest.approx(-d.mean(), **close)
    assert got["mismatch/k2"] == pytest.approx((d**2).mean() / 2, **close)
    assert got["mismatch/kl"] == pytest.approx((np.exp(d) - 1 - d).mean(), **close)
    assert got["mismatch/kl"] >= 0 or abs(got["mismatch/kl"]) < 1e-7
    for name, w in (("", np.exp(d)), ("_sequence", np.exp(log_w))):
        assert got[f"mismatch/ess{name}"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()), **close)
        assert got[f"mismatch/chi2{name}"] == pytest.approx((w**2).mean() - 1, **close)
        assert 0 < got[f"mismatch/ess{name}"] <= 1 + 1e-6


def test_small_mismatch_keeps_its_digits():
    """k3 of delta = 1e-4 is 5e-9; in fp32, exp(delta) - 1 - delta would cancel to noise of 1e-8."""
    assert measure([1e-4] * 4, old=0.0)["mismatch/kl"] == pytest.approx(5e-9, rel=0.01)


def test_a_huge_difference_stays_a_number():
    """A row of a file must be readable when it matters most: ratios are clamped to exp(20), differences are not."""
    got = measure([200.0, -200.0], cu=[0, 1, 2], old=-300.0)
    assert got["mismatch/logprob_abs_diff_max"] == 200 and got["mismatch/extreme_count"] == 2
    assert got["mismatch/chi2"] == got["mismatch/chi2_sequence"] == pytest.approx(math.exp(40) / 2, rel=1e-5)


def test_nan_is_counted_and_kept_out_of_the_means():
    """And a sample with one is out of the figures of samples, where it has none to give."""
    got = measure([NAN, 0.5, INF, 0.5], cu=[0, 2, 3, 4])
    assert got["mismatch/nan_frac"] == 0.5 and got["mismatch/nan_count"] == 2
    assert got["mismatch/logprob_abs_diff"] == got["mismatch/logprob_abs_diff_max"] == pytest.approx(0.5)
    assert got["mismatch/prob_abs_diff"] == pytest.approx(math.exp(-0.5) - math.exp(-1))
    assert got["mismatch/chi2_sequence"] == pytest.approx(math.e - 1)


def test_only_tokens_under_loss():
    got = measure([5.0, 0.5, NAN, INF], mask=[False, True, False, False], cu=[0, 1, 3, 4])
    assert got["mismatch/logprob_abs_diff_max"] == pytest.approx(0.5)
    assert got["mismatch/nan_frac"] == got["mismatch/nan_count"] == 0.0
    assert got["mismatch/ess_sequence"] == pytest.approx(1.0)


def test_ess_is_exact_over_micro_batches():
    """Reduced from two uneven micro-batches it is that of their union; a mean of two ESS would not be."""
    a, b = [0.1, 1.0, -0.7], [2.0]
    parts = [stats(a), stats(b)]
    reduced = {
        k: float(sum(p[k].total for p in parts) / sum(p[k].count for p in parts)) for k in parts[0] if "rho" in k
    }
    whole = measure(a + b, cu=[0, 3, 4])
    for name, figure in finish(reduced).items():
        assert figure == pytest.approx(whole[name], rel=1e-5)


def test_finish_passes_other_metrics_through_and_is_safe_twice():
    once = finish({"train/loss": 1.0, "mismatch/rho_mean": 2.0, "mismatch/rho_sq_mean": 8.0})
    assert once == {"train/loss": 1.0, "mismatch/ess": 0.5, "mismatch/chi2": 7.0} == finish(once)

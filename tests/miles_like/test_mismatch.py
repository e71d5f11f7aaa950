"""Mismatch statistics on hand-made log-probabilities.

A metric that reads 0 for a broken alignment is worse than none, so each is checked for its value, for moving by one
unit in the last place, and for not swallowing nan. Not covered: the reduction over ranks, which the trainer does.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_like.algorithms.mismatch import finish, mismatch_stats
from miles_like.types import Reduce, Stat


def measure(delta, mask=None) -> dict[str, float]:
    return finish({k: value(s) for k, s in stats(delta, mask).items()})


def stats(delta, mask=None) -> dict[str, Stat]:
    d = torch.tensor(delta)
    m = torch.ones(len(d), dtype=torch.bool) if mask is None else torch.tensor(mask)
    old = torch.full_like(d, -1.0)
    return mismatch_stats(logprobs=old + d, rollout_logprobs=old, loss_mask=m)


def value(s: Stat) -> float:
    return float(s.total) if s.reduce is Reduce.MAX else float(s.total / s.count)


def test_hand_made_deltas():
    """delta = ln 3, -ln 3, 0, 0: rho = 3, 1/3, 1, 1."""
    a = math.log(3)
    got = measure([a, -a, 0.0, 0.0])
    rho = [3, 1 / 3, 1, 1]
    assert got == pytest.approx(
        {
            "mismatch/logprob_abs_diff": a / 2,
            "mismatch/logprob_abs_diff_max": a,
            "mismatch/kl": ((3 - 1 - a) + (1 / 3 - 1 + a)) / 4,
            "mismatch/extreme_frac": 0.5,
            "mismatch/nan_frac": 0.0,
            "mismatch/ess": sum(rho) ** 2 / (4 * sum(r * r for r in rho)),
        },
        rel=1e-6,
    )


def test_equal_log_probs_give_exact_zeros():
    got = measure([0.0, 0.0, 0.0])
    assert got.pop("mismatch/ess") == 1.0
    assert set(got.values()) == {0.0}


def test_one_unit_in_the_last_place_moves_it():
    old = torch.tensor([-1.0, -0.5])
    new = torch.nextafter(old, torch.zeros(2))
    got = mismatch_stats(logprobs=new, rollout_logprobs=old, loss_mask=torch.ones(2, dtype=torch.bool))
    assert value(got["mismatch/logprob_abs_diff"]) > 0
    assert value(got["mismatch/logprob_abs_diff_max"]) > 0


@given(delta=st.lists(st.floats(-3, 3), min_size=1, max_size=30))
def test_matches_the_definitions_in_double(delta):
    d = torch.tensor(delta, dtype=torch.float64)
    rho = d.exp()
    got = measure(delta)
    assert got["mismatch/kl"] == pytest.approx(float((rho - 1 - d).mean()), rel=1e-4, abs=1e-6)
    assert got["mismatch/kl"] >= 0 or abs(got["mismatch/kl"]) < 1e-7
    assert got["mismatch/ess"] == pytest.approx(float(rho.sum() ** 2 / (len(d) * rho.square().sum())), rel=1e-4)
    assert 0 < got["mismatch/ess"] <= 1 + 1e-6


def test_small_mismatch_keeps_its_digits():
    """k3 of delta = 1e-4 is 5e-9; in fp32, exp(delta) - 1 - delta would cancel to noise of 1e-8."""
    delta = torch.full((4,), 1e-4)
    got = mismatch_stats(logprobs=delta, rollout_logprobs=torch.zeros(4), loss_mask=torch.ones(4, dtype=torch.bool))
    assert value(got["mismatch/kl"]) == pytest.approx(5e-9, rel=0.01)


def test_nan_is_counted_and_kept_out_of_the_means():
    got = measure([float("nan"), 0.5, float("inf"), 0.5])
    assert got["mismatch/nan_frac"] == 0.5
    assert got["mismatch/logprob_abs_diff"] == pytest.approx(0.5)
    assert got["mismatch/logprob_abs_diff_max"] == pytest.approx(0.5)


def test_only_tokens_under_loss():
    got = measure([5.0, 0.5, float("nan")], mask=[False, True, False])
    assert got["mismatch/logprob_abs_diff_max"] == pytest.approx(0.5)
    assert got["mismatch/nan_frac"] == 0.0


def test_ess_is_exact_over_micro_batches():
    """Reduced from two uneven micro-batches it is that of their union; a mean of two ESS would not be."""
    a, b = [0.1, 1.0, -0.7], [2.0]
    parts = [stats(a), stats(b)]
    reduced = {
        k: float(sum(p[k].total for p in parts) / sum(p[k].count for p in parts)) for k in parts[0] if "max" not in k
    }
    assert finish(reduced)["mismatch/ess"] == pytest.approx(measure(a + b)["mismatch/ess"])


def test_finish_passes_other_metrics_through_and_is_safe_twice():
    once = finish({"train/loss": 1.0, "mismatch/rho_mean": 2.0, "mismatch/rho_sq_mean": 8.0})
    assert once == {"train/loss": 1.0, "mismatch/ess": 0.5} == finish(once)

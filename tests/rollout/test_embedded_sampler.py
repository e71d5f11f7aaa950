"""Draws follow the stated distribution, and depend on (seed, index, position) alone.

Why it must hold: a log-prob is only the policy's if tokens were drawn from it, and a run resumes bitwise only if a draw
has no hidden state. The oracle of distributions is the softmax itself, by a chi-squared bound on 20,000 draws. Not
covered: quality of the random numbers beyond that.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.embedded import plain_ops
from rollout.embedded.sampler import Draw, mix, sample, stream_keys, uniform

N, V = 20_000, 8
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -30.0, 1.5])


def draws(temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    draw = Draw(
        keys=stream_keys(3, np.arange(N) % 50),
        positions=np.arange(N) // 50,
        temperature=np.full(N, temperature, np.float32),
        top_p=np.full(N, top_p, np.float32),
        top_k=np.full(N, top_k, np.int64),
    )
    return sample(LOGITS.expand(N, V), draw, plain_ops)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, range(8)),
        ({"temperature": 2.0}, range(8)),
        ({"top_k": 3}, (0, 7, 1)),
        ({"top_p": 0.6}, (0, 7)),  # .43 + .26 reach it
        ({"top_p": 0.4}, (0,)),
        ({"top_p": 0.9, "top_k": 4}, (0, 7, 1, 2)),  # nine tenths of what top-k left
    ],
)
def test_draws_follow_the_distribution(settings: dict[str, float], kept: tuple[int, ...]) -> None:
    tokens, logprobs = draws(**settings)
    want = (LOGITS / settings.get("temperature", 1.0)).log_softmax(-1)
    torch.testing.assert_close(logprobs, want[tokens])
    p = torch.zeros(V, dtype=torch.float64)
    p[list(kept)] = want[list(kept)].double().exp()
    expected = N * p / p.sum()
    seen = torch.bincount(tokens, minlength=V).double()
    assert not seen[p == 0].any()
    often = expected > 5
    chi2 = ((seen - expected)[often] ** 2 / expected[often]).sum()
    assert chi2 < 30, f"chi-squared {chi2} of {int(often.sum())} cells"  # 8 cells exceed 30 once in 10,000


def test_greedy_takes_the_best_and_reports_raw_log_probs() -> None:
    tokens, logprobs = draws(temperature=0.0)
    assert tokens.unique().tolist() == [0]
    torch.testing.assert_close(logprobs[0], LOGITS.log_softmax(-1)[0])


def test_a_row_does_not_see_its_neighbours() -> None:
    """Rows of every kind in one call, then each alone."""
    torch.manual_seed(0)
    logits = torch.randn(40, 50)
    draw = Draw(
        keys=stream_keys(1, np.arange(40)),
        positions=np.arange(40),
        temperature=np.array([0.0, 1.0, 0.5, 1.0] * 10, np.float32),
        top_p=np.array([1.0, 1.0, 0.8, 0.9] * 10, np.float32),
        top_k=np.array([-1, -1, -1, 4] * 10, np.int64),
    )
    tokens, logprobs = sample(logits, draw, plain_ops)
    for i in range(40):
        one = slice(i, i + 1)
        alone = Draw(**{k: getattr(draw, k)[one] for k in Draw.__slots__})
        t, p = sample(logits[one], alone, plain_ops)
        assert t[0] == tokens[i]
        assert abs(float(p[0] - logprobs[i])) < 1e-6


def test_the_finalizer_is_splitmix64() -> None:
    """First outputs of the published generator from seed 1234567 (Vigna's reference code)."""
    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + golden * i) % 2**64 for i in (1, 2, 3)], np.uint64)
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_streams_of_seeds_indices_and_positions_are_apart() -> None:
    keys = np.concatenate([stream_keys(s, np.arange(100)) for s in (0, 1, 2, 2**63, -1)])
    assert len(set(keys.tolist())) == 500
    u = np.stack([uniform(keys, np.full(500, p)) for p in range(200)])
    assert len(np.unique(u)) == u.size and u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.02

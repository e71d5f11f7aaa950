"""Draws follow the stated distribution, and depend on (seed, index, position) alone.

Why it must hold: a log-prob is only the policy's if tokens were drawn from it, and a run resumes bitwise only if a draw
has no hidden state. The oracle of distributions is SGLang's rule written out token by token, by a chi-squared bound;
tests/sglang_cpu compares the kept tokens with SGLang's own function. Not covered: quality of the random numbers beyond
that.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from rollout.embedded.engine.sampler import Draw, kept, mix, sample, stream_keys, uniform
from rollout.embedded.model import plain_ops

N, V = 20_000, 8
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -30.0, 1.5])


def draw(rows: int, keys: np.ndarray, positions: np.ndarray, **settings: object) -> Draw:
    """Settings of every row: a value, or [rows]."""
    filled = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0} | settings
    types = {"temperature": np.float32, "top_p": np.float32, "top_k": np.int64, "min_p": np.float32}
    return Draw(
        keys=keys, positions=positions, **{k: np.broadcast_to(v, rows).astype(types[k]) for k, v in filled.items()}
    )


def draws(logits: torch.Tensor = LOGITS, **settings: float) -> tuple[torch.Tensor, torch.Tensor]:
    how = draw(N, stream_keys(3, np.arange(N) % 50), np.arange(N) // 50, **settings)
    return sample(logits.expand(N, len(logits)), how, plain_ops)


def reference(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """SGLang's distribution [V] in fp64, token by token."""
    weights = [math.exp(float(v) / temperature) for v in logits]
    p = [w / sum(weights) for w in weights]
    best = max(p)
    out = np.zeros(len(p))
    for token, mine in enumerate(p):
        likelier = [q for other, q in enumerate(p) if q > mine or (q == mine and other < token)]
        assert top_p == 1 or abs(sum(likelier) - top_p) > 1e-4, "too near for a test in fp32"
        few = top_k < 0 or len(likelier) < top_k
        if few and (top_p == 1 or sum(likelier) <= top_p) and mine >= min_p * best:
            out[token] = mine
    return out / out.sum()


COMBINATIONS = list(itertools.product((0.7, 1.6), (-1, 2, 5, 40), (1.0, 0.45, 0.87), (0.0, 0.05, 0.3)))
FALSE_ALARM = 1e-4  # of the whole table, were the seed not fixed


@pytest.mark.parametrize("temperature", sorted({c[0] for c in COMBINATIONS}))
def test_draws_follow_sglangs_distribution_in_every_combination(temperature: float) -> None:
    """Chi-squared of 20,000 draws each against the exact distribution, at FALSE_ALARM / 72 a combination."""
    logits = torch.tensor([1.4, 0.9, 0.5, 0.1, -0.5, -1.0, -30.0, 1.2, 0.3, -2.2, 0.8, -0.2])
    supports = set()
    for _, top_k, top_p, min_p in (c for c in COMBINATIONS if c[0] == temperature):
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        tokens, logprobs = draws(logits, **settings)
        torch.testing.assert_close(logprobs, (logits / temperature).log_softmax(-1)[tokens])
        expected = N * reference(logits, **settings)
        seen = np.bincount(tokens.numpy(), minlength=len(logits))
        assert not seen[expected == 0].any(), settings
        supports.add(tuple((expected > 0).tolist()))
        often = expected > 5
        chi2 = float(((seen - expected)[often] ** 2 / expected[often]).sum())
        chance = float(torch.special.gammaincc(torch.tensor((often.sum() - 1) / 2), torch.tensor(chi2 / 2)))
        assert often.sum() == 1 or chance > FALSE_ALARM / len(COMBINATIONS), f"{settings}: chi-squared {chi2}"
    assert len(supports) >= 5  # the cuts are not the same one


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "ids"),
    [
        (-1, 0.5, 0.0, (2, 0)),  # as much as top_p before it is not more than top_p
        (-1, 0.4999, 0.0, (2,)),
        (-1, 0.75, 0.0, (2, 0, 4)),
        (2, 0.75, 0.0, (2, 0)),
        (3, 0.55, 0.0, (2, 0)),  # of what top-k leaves, renormalised, the first alone would reach .571
        (-1, 1.0, 0.25, (2, 0, 4)),
        (-1, 1.0, 0.2501, (2, 0)),
        (2, 0.75, 0.25, (2, 0)),
        (4, 1.0, 0.0, (2, 0, 4, 1)),  # of 1 and 3, which are equal, the lower id
        (99, 1.0, 0.0, (2, 0, 4, 1, 3)),
        (-1, 1.0, 1.0, (2,)),
    ],
)
def test_at_a_boundary_a_token_is_kept_as_sglang_keeps_it(
    top_k: int, top_p: float, min_p: float, ids: tuple[int, ...]
) -> None:
    """Probabilities that are sums of halves: no rounding decides."""
    p = torch.tensor([[0.25, 0.0625, 0.5, 0.0625, 0.125]])
    weights, order = kept(p, top_k=torch.tensor([top_k]), top_p=torch.tensor([top_p]), min_p=torch.tensor([min_p]))
    assert order[weights > 0].tolist() == list(ids)
    torch.testing.assert_close(weights[weights > 0], p[0, list(ids)], rtol=0, atol=0)


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 9e-7, "top_p": 0.5}, {"top_k": 1, "temperature": 0.5}]
)
def test_greedy_takes_the_best_and_reports_raw_log_probs(settings: dict[str, float]) -> None:
    """A temperature below 1e-6 is greedy at SGLang, and so is top_k = 1; the temperature is not applied then."""
    tokens, logprobs = draws(**settings)
    assert tokens.unique().tolist() == [0]
    torch.testing.assert_close(logprobs[0], LOGITS.log_softmax(-1)[0])


def test_a_row_does_not_see_its_neighbours() -> None:
    """Rows of every kind in one call, then each alone."""
    torch.manual_seed(0)
    logits = torch.randn(40, 50)
    how = draw(
        40,
        stream_keys(1, np.arange(40)),
        np.arange(40),
        temperature=np.array([0.0, 1.0, 0.5, 1.0, 0.7] * 8),
        top_p=np.array([1.0, 1.0, 0.8, 0.9, 1.0] * 8),
        top_k=np.array([-1, -1, -1, 4, 1] * 8),
        min_p=np.array([0.0, 0.0, 0.0, 0.2] * 10),
    )
    tokens, logprobs = sample(logits, how, plain_ops)
    for i in range(40):
        one = slice(i, i + 1)
        alone = Draw(**{k: getattr(how, k)[one] for k in Draw.__slots__})
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

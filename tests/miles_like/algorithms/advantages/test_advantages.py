"""Advantages against closed forms, plain loops and torch.

A group's advantages must sum to zero and be blind to a shift (and, with std, a scale) of the rewards, or the policy
would be paid for a prompt's difficulty; those of tokens must be the sums their papers define, whatever the samples'
lengths.
Equality with trl: test_trl.py. Not covered: whether they make a model learn.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miles_like.algorithms.advantages.grpo import STD_EPS, group_relative
from miles_like.algorithms.advantages.maxrl import over_mean
from miles_like.algorithms.advantages.penalty import KlPenalty
from miles_like.algorithms.advantages.ppo import Gae
from miles_like.algorithms.advantages.reinforce import Reinforce
from miles_like.algorithms.advantages.reinforce_pp import ReinforcePlusPlus, whitened_baseline
from miles_like.algorithms.advantages.rloo import leave_one_out
from miles_like.algorithms.advantages.shuffle import shuffle_over_batch
from miles_like.algorithms.advantages.tokens import WHITEN_EPS
from miles_like.algorithms.registry import make_algorithm
from miles_like.config.sections.algorithm import AlgorithmConfig, RolloutAlgorithm
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.config.sections.flat import names_of, parts_of
from miles_like.types import REFERENCE, VALUES, SampleGroup
from tests.support.made_samples import group, rewarded, sample
from tests.support.refusals import refuses

ADVANTAGES = names_of(parts_of(RolloutAlgorithm)["advantage"])

rewards = st.lists(st.floats(-5, 5), min_size=2, max_size=16)
NOTHING = SampleGroup(prompt=rewarded([0.0]).prompt, samples=())


def made(name: str, **keys):
    return make_algorithm(AlgorithmConfig(advantage=name, **keys), CorrectionConfig())


def test_hand_made_values():
    assert group_relative([1.0, 0.0, 0.0, 0.0], normalize_std=False) == [0.75, -0.25, -0.25, -0.25]
    got = group_relative([1.0, 0.0, 0.0, 0.0], normalize_std=True)
    assert got == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)  # sample deviation of one in four is 1/2
    assert leave_one_out([rewarded([1.0, 0.0, 0.0, 0.5])]) == [pytest.approx([5 / 6, -0.5, -0.5, 1 / 6])]
    assert over_mean([rewarded([1.0, 0.0, 0.0, 0.0])]) == [[3.0, -1.0, -1.0, -1.0]]
    two = [rewarded([1.0, 0.0]), rewarded([3.0])]
    assert Reinforce(False)(two) == [[1.0, 0.0], [3.0]]
    assert Reinforce(True)(two) == [pytest.approx([-1 / 3, -4 / 3]), pytest.approx([5 / 3])]
    assert made("dr_grpo").advantages(two) == [[0.5, -0.5], [0.0]]


@given(rewards=rewards)
def test_matches_torch(rewards):
    r = torch.tensor(rewards, dtype=torch.float64)
    expected = (r - r.mean()) / (r.std() + STD_EPS)
    assert group_relative(rewards, normalize_std=True) == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-7)
    assert group_relative(rewards, normalize_std=False) == pytest.approx((r - r.mean()).tolist(), abs=1e-12)


@given(rewards=rewards)
def test_leaving_one_out_is_the_group_s_mean_scaled(rewards):
    """r_i less the others' mean is G / (G - 1) times r_i less the mean: one direction, another length."""
    n = len(rewards)
    want = [a * n / (n - 1) for a in group_relative(rewards, normalize_std=False)]
    assert leave_one_out([rewarded(rewards)])[0] == pytest.approx(want, abs=1e-12)


@given(right=st.integers(0, 8), n=st.integers(1, 8))
def test_maxrl_is_the_likelihood_s_gradient_of_right_answers(right, n):
    """With binary rewards, the mean over the group of advantage times score is the right ones' mean score less that of
    all, for any scores (arXiv:2602.02710, theorem 2); no right one: nothing."""
    right = min(right, n)
    scores = torch.linspace(-1, 2, n, dtype=torch.float64).square()
    r = [1.0] * right + [0.0] * (n - right)
    got = float((torch.tensor(over_mean([rewarded(r)])[0], dtype=torch.float64) * scores).mean())
    want = float(scores[:right].mean() - scores.mean()) if right else 0.0
    assert got == pytest.approx(want, abs=1e-12)


@given(value=st.floats(0, 1e6), n=st.integers(1, 8))
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp_baseline"])
@settings(max_examples=20, deadline=None)
def test_a_group_of_equal_rewards_gives_exact_zeros(name, value, n):
    """In floats the mean of n equal values may miss them by a bit, which a division would blow up to 1. Also beside
    another group, but for the one that is then normalized over all."""
    assert made(name).advantages([rewarded([value] * n)]) == [[0.0] * n]
    if name != "reinforce_pp_baseline":
        assert made(name).advantages([rewarded([0.0, 3.0, 1.0]), rewarded([value] * n)])[1] == [0.0] * n


@pytest.mark.parametrize("name", ADVANTAGES)
def test_groups_of_one_and_of_none(name):
    """Samples are given up, also all of a prompt's; what is left keeps its shape and is finite. A lone sample has no
    baseline of its group: 0 where there is no other."""
    lone, none = rewarded([2.0]), NOTHING
    scored = [with_values(g, 0.5) for g in (lone, none, rewarded([1.0, 0.0]))]
    got = made(name).advantages(scored)
    assert [len(g) for g in got] == [1, 0, 2]
    assert all(bool(torch.as_tensor(a).isfinite().all()) for g in got for a in g)
    if name in ("grpo", "dr_grpo", "rloo", "maxrl"):
        assert got[0] == [0.0]
    assert made(name).advantages([none]) == [[]] and made(name).advantages([]) == []


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_reward_that_is_no_number_is_refused(name):
    for bad, facts in ((float("nan"), ("p", "[1.0, nan]")), (None, ("p/1",))):
        with refuses(ValueError, *facts):
            made(name).advantages([with_values(group([sample("p", 0, reward=1.0), sample("p", 1, reward=bad)]), 0.0)])


def test_a_mean_below_zero_is_refused():
    with refuses(ValueError, "[-1.0, 1.0]", "algorithm.advantage", "maxrl"):
        over_mean([rewarded([-1.0, 1.0])])


def with_values(g: SampleGroup, value: float) -> SampleGroup:
    streams = [{VALUES: torch.full(s.token_ids.shape, value), REFERENCE: s.logprobs} for s in g.samples]
    return replace(g, samples=tuple(replace(s, streams=x) for s, x in zip(g.samples, streams, strict=True)))


def rollout(seed: int, shape: list[list[int]]) -> list[SampleGroup]:
    """Groups of samples with so many response tokens; every third token of a long one is an environment's."""
    r = torch.Generator().manual_seed(seed)
    groups = []
    for n, lengths in enumerate(shape):
        samples = []
        for i, length in enumerate(lengths):
            s = sample(f"p{n}", i, response_len=length, reward=float(torch.randn((), generator=r)))
            size = s.token_ids.shape
            mask = s.loss_mask & (torch.arange(size[0]) % 3 != 0) if length > 4 else s.loss_mask
            logprobs = torch.where(mask, -torch.rand(size, generator=r), 0.0)
            noise = torch.randn(3, *size, generator=r)
            streams = {VALUES: noise[0], REFERENCE: logprobs + 0.3 * noise[1]}
            samples.append(replace(s, loss_mask=mask, logprobs=logprobs, streams=streams))
        groups.append(group(samples))
    return groups


def by_loop(s, *, gamma, lam, penalty=0.0, critic=True):
    """A sample's advantages, one token after the other from the end, of its tokens under loss."""
    places = [i for i, m in enumerate(s.loss_mask.tolist()) if m]
    values = s.streams[VALUES].double() if critic else torch.zeros(len(s.token_ids), dtype=torch.float64)
    out, ahead, following = {}, 0.0, 0.0
    for i in reversed(places):
        reward = -penalty * float(s.logprobs[i].double() - s.streams[REFERENCE][i].double())
        reward += s.reward if i == places[-1] else 0.0
        ahead = reward + gamma * following - float(values[i]) + gamma * lam * ahead
        following = float(values[i])
        out[i] = ahead
    return out


SHAPES = st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=4), min_size=1, max_size=3)


def flat(samples, got):
    return torch.tensor([float(a[i]) for s, a in zip(samples, got, strict=True) for i in torch.where(s.loss_mask)[0]])


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, seed=st.integers(0, 99), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.95, 0.0]))
def test_gae_is_the_plain_loop(shape, seed, gamma, lam):
    groups = rollout(seed, shape)
    samples = [s for g in groups for s in g.samples]
    gae = Gae(gamma=gamma, gae_lambda=lam, penalty=KlPenalty(coefficient=0.2, estimator="k1"))
    loops = [by_loop(s, gamma=gamma, lam=lam, penalty=0.2) for s in samples]
    returns = list(chain(*gae.returns(groups)))
    for s, got, loop in zip(samples, returns, loops, strict=True):
        assert got.shape == s.token_ids.shape and got.dtype == torch.float32
        want = {i: a + float(s.streams[VALUES][i]) for i, a in loop.items()}
        assert {i: float(x) for i, x in enumerate(got) if i in want} == pytest.approx(want, rel=1e-5, abs=1e-5)
        assert not got[~s.loss_mask].any()
    want = torch.tensor([a for s, loop in zip(samples, loops, strict=True) for a in (loop[i] for i in sorted(loop))])
    got = flat(samples, chain(*gae(groups)))
    if len(want) > 1:
        torch.testing.assert_close(got, (want - want.mean()) * (want.var() + WHITEN_EPS).rsqrt(), rtol=1e-3, atol=1e-4)


@settings(deadline=None, max_examples=25)
@given(shape=SHAPES, seed=st.integers(0, 99), gamma=st.sampled_from([1.0, 0.5]))
@example(shape=[[2]], seed=37, gamma=1.0)  # two tokens with nearly the same return
def test_reinforce_pp_is_the_plain_loop(shape, seed, gamma):
    groups = rollout(seed, shape)
    samples = [s for g in groups for s in g.samples]
    penalty = KlPenalty(coefficient=0.5, estimator="k1")
    got = flat(samples, chain(*ReinforcePlusPlus(gamma=gamma, penalty=penalty)(groups)))
    loops = [by_loop(s, gamma=gamma, lam=1.0, penalty=0.5, critic=False) for s in samples]
    want = torch.tensor([loop[i] for loop in loops for i in sorted(loop)])
    if len(want) > 1:
        torch.testing.assert_close(got, (want - want.mean()) * (want.var() + WHITEN_EPS).rsqrt(), rtol=1e-3, atol=1e-4)


def test_a_perfect_critic_leaves_nothing():
    """With gamma = 1 and values that are the coming reward, every delta is 0."""
    groups = [with_values(rewarded([0.5, 0.5]), 0.5)]
    assert all(not a.any() for a in chain(*Gae(gamma=1.0, gae_lambda=0.9, penalty=None)(groups)))


def test_the_baseline_form_is_white_over_tokens():
    """Mean 0 and deviation 1 where each sample counts as often as it has tokens; not the same as over samples."""
    groups = rollout(0, [[1, 9, 2], [20, 3]])
    samples = [s for g in groups for s in g.samples]
    values = list(chain(*whitened_baseline(groups)))
    of_tokens = torch.tensor([v for s, v in zip(samples, values, strict=True) for _ in range(s.response_len)])
    assert float(of_tokens.mean()) == pytest.approx(0, abs=1e-6) and float(of_tokens.std()) == pytest.approx(
        1, abs=1e-5
    )
    assert abs(sum(values)) > 0.1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_a_penalty_of_samples_is_the_sum_over_its_tokens(estimator):
    """As trl's RLOO and verl have it; what is not under loss is not counted."""
    groups = rollout(3, [[4, 7, 0]])
    got = made("rloo", kl_coefficient=0.1, kl_in="reward", kl_estimator=estimator).advantages(groups)
    formula = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d, "abs": abs}[
        estimator
    ]
    less = []
    for s in groups[0].samples:
        d = (s.streams[REFERENCE] - s.logprobs).double()[s.loss_mask].tolist()
        less.append(s.reward - 0.1 * sum(map(formula, d)))
    assert got[0] == pytest.approx(leave_one_out([rewarded(less)])[0], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", ["grpo", "ppo", "reinforce_pp"])
def test_a_missing_stream_is_named(name):
    with refuses(ValueError, "p/0"):
        made(name, kl_coefficient=0.1, kl_in="reward").advantages([rewarded([1.0, 0.0])])


def test_what_each_needs():
    assert made("grpo").needs == frozenset() and made("grpo").returns([rewarded([1.0])]) is None
    assert made("ppo").needs == {VALUES}
    assert made("ppo", kl_coefficient=0.1, kl_in="reward").needs == {VALUES, REFERENCE}
    assert made("grpo", kl_coefficient=0.1).needs == frozenset()


@given(batch=st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=5), min_size=1, max_size=8), seed=st.integers())
def test_shuffling_keeps_the_values_and_the_shape(batch, seed):
    groups = [rewarded(of) for of in batch]
    dealt = shuffle_over_batch(groups, batch, seed=seed)
    assert [len(g) for g in dealt] == [len(g) for g in batch]
    assert Counter(chain.from_iterable(dealt)) == Counter(chain.from_iterable(batch))
    assert dealt == shuffle_over_batch(groups, batch, seed=seed)


def test_shuffling_moves_values_between_groups():
    batch = [[float(10 * g + i) for i in range(8)] for g in range(8)]
    groups = [rewarded(of) for of in batch]
    dealt = shuffle_over_batch(groups, batch, seed=0)
    crossed = sum(int(v // 10) != g for g, row in enumerate(dealt) for v in row)
    assert crossed > 40  # 56 expected of 64
    assert dealt != shuffle_over_batch(groups, batch, seed=1)
    for of_tokens in (torch.zeros(3), None):
        with refuses(ValueError, "algorithm.shuffle_advantages", "algorithm.advantage"):
            shuffle_over_batch([rewarded([1.0])], [[of_tokens]], seed=0)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_algorithms_travel_to_other_processes(name):
    algorithm = made(name)
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm

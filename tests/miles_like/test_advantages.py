"""Group-relative advantages and the algorithm registry.

Advantages must sum to zero within a group and be blind to a shift (and, with std, a scale) of the rewards, or the
policy would be paid for a prompt's difficulty. Not covered: whether they make a model learn.
"""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_samples import rewarded

from miles_like.algorithm_config import AlgorithmConfig, CorrectionConfig
from miles_like.algorithms.advantages import STD_EPS, group_relative, shuffle_over_batch
from miles_like.algorithms.registry import make_algorithm

rewards = st.lists(st.floats(-5, 5), min_size=2, max_size=16)


def test_hand_made_values():
    assert group_relative([1.0, 0.0, 0.0, 0.0], normalize_std=False) == [0.75, -0.25, -0.25, -0.25]
    got = group_relative([1.0, 0.0, 0.0, 0.0], normalize_std=True)
    assert got == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)  # sample deviation of one in four is 1/2


@given(rewards=rewards)
def test_matches_torch(rewards):
    r = torch.tensor(rewards, dtype=torch.float64)
    expected = (r - r.mean()) / (r.std() + STD_EPS)
    assert group_relative(rewards, normalize_std=True) == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-7)
    assert group_relative(rewards, normalize_std=False) == pytest.approx((r - r.mean()).tolist(), abs=1e-12)


@given(value=st.floats(-1e6, 1e6), n=st.integers(1, 8), std=st.booleans())
def test_a_group_of_equal_rewards_gives_exact_zeros(value, n, std):
    """In floats the mean of n equal values may miss them by a bit, which the division would blow up to 1."""
    assert group_relative([value] * n, normalize_std=std) == [0.0] * n


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="not all finite"):
        group_relative([1.0, float("nan")], normalize_std=True)


@given(batch=st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=5), min_size=1, max_size=8), seed=st.integers())
def test_shuffling_keeps_the_values_and_the_shape(batch, seed):
    dealt = shuffle_over_batch(batch, seed=seed)
    assert [len(g) for g in dealt] == [len(g) for g in batch]
    assert Counter(chain.from_iterable(dealt)) == Counter(chain.from_iterable(batch))
    assert dealt == shuffle_over_batch(batch, seed=seed)


def test_shuffling_moves_values_between_groups():
    batch = [[float(10 * g + i) for i in range(8)] for g in range(8)]
    dealt = shuffle_over_batch(batch, seed=0)
    crossed = sum(int(v // 10) != g for g, row in enumerate(dealt) for v in row)
    assert crossed > 40  # 56 expected of 64
    assert dealt != shuffle_over_batch(batch, seed=1)


def test_registry_builds_what_the_config_says():
    algorithm = make_algorithm(AlgorithmConfig(clip_low=0.1, clip_high=0.3, normalize_std=False), CorrectionConfig())
    assert algorithm.name == "grpo"
    assert algorithm.advantages([rewarded([1.0, 0.0])]) == [[0.5, -0.5]]
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm  # it travels to the trainer's processes
    assert (algorithm.loss.clip_low, algorithm.loss.clip_high) == (0.1, 0.3)
    with pytest.raises(ValueError, match="'grppo': did you mean 'grpo'"):
        make_algorithm(AlgorithmConfig(name="grppo"), CorrectionConfig())

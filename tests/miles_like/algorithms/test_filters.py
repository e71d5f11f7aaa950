"""Which groups are trained on, and what becomes of samples at the token limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from miles_like.algorithms.filters import make_filter
from miles_like.algorithms.truncation import OverlongShaping, make_overlong, mask_truncated
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.types import Finish, SampleGroup
from tests.support.made_samples import group, rewarded, sample
from tests.support.refusals import refuses


def test_groups_that_teach_something_stay():
    refuse = make_filter("nonzero_std")
    assert refuse(rewarded([1.0, 0.0])) is None
    none = SampleGroup(prompt=rewarded([0.0]).prompt, samples=())
    equal = [refuse(rewarded(rewards)) for rewards in ([1.0, 1.0], [1.0], [0.0, 0.0], [-1.0], [0.25, 0.25])]
    reason = "all rewards equal"
    assert equal == [f"{reason} (1)", f"{reason} (1)", f"{reason} (0)", f"{reason} (-1)", reason]
    assert refuse(none) == reason
    assert make_filter("off")(rewarded([1.0, 1.0])) is None
    with refuses(ValueError, "p/0"):
        refuse(group([sample(reward=None)]))


def at_most_one(group: SampleGroup) -> str | None:
    return None if len(group.samples) < 2 else "too many"


def keeps(group: SampleGroup) -> bool:
    return True


def test_a_filter_of_one_s_own():
    with refuses(ValueError, "test_filters.py:keeps", "True", "None"):
        make_filter(f"{__file__}:keeps")(rewarded([1.0]))
    own = make_filter(f"{__file__}:at_most_one")
    assert own(rewarded([1.0])) is None and own(rewarded([1.0, 0.0])) == "too many"
    with refuses(ValueError, "algorithm.filter", "nonzero", "nonzero_std"):
        make_filter("nonzero")


def test_overlong_shaping_by_hand():
    """DAPO's eq. 13 with a limit of 10 and a buffer of 4: nothing up to 6, then a quarter a token, no more than 1."""
    lengths = {0: 0, 5: 0, 6: 0, 7: -0.25, 9: -0.75, 10: -1, 12: -1}
    groups = [group([sample("p", i, response_len=n, reward=2.0) for i, n in enumerate(lengths)])]
    got = OverlongShaping(limit=10, buffer=4, factor=0.5).shape(groups[0])
    assert [s.reward - 2.0 for s in got.samples] == pytest.approx([0.5 * x for x in lengths.values()])
    assert got.samples[3].reward_parts == {"overlong": -0.125}
    assert groups[0].samples[3].reward == 2.0
    (episode,) = groups[0].samples[2:3]  # 6 tokens, some of an environment: they count for the limit
    episode = replace(episode, loss_mask=torch.arange(8) > 5)
    got = OverlongShaping(limit=8, buffer=4, factor=1.0).shape(group([episode]))
    assert got.samples[0].reward == 1.5
    with refuses(ValueError, 11, 10):
        OverlongShaping(limit=10, buffer=11, factor=1.0)


def test_the_buffer_is_a_fifth_of_the_limit_where_none_is_given():
    assert make_overlong(None, 10) is None
    assert make_overlong(AlgorithmConfig(name="dapo").parts.overlong, 20480) == OverlongShaping(
        limit=20480, buffer=4096, factor=1.0
    )
    assert make_overlong(AlgorithmConfig(name="dapo").parts.overlong, 3) == OverlongShaping(
        limit=3, buffer=1, factor=1.0
    )
    assert make_overlong(AlgorithmConfig(name="dapo", overlong_buffer=3).parts.overlong, 10).buffer == 3


def test_truncated_samples_are_not_trained_on():
    cut, whole = sample("p", 0, finish=Finish.LENGTH, reward=0.0), sample("p", 1, reward=1.0)
    (got,) = mask_truncated([group([cut, whole])])
    assert not got.samples[0].loss_mask.any() and torch.equal(got.samples[1].loss_mask, whole.loss_mask)
    assert got.rewards == [0.0, 1.0]
    assert mask_truncated([]) == []
    with refuses(ValueError, 2, "algorithm.mask_truncated", "rollout.max_new_tokens"):
        mask_truncated([group([cut, cut])])
    halves = [group([cut, whole]), group([cut, cut])]
    assert len(mask_truncated(halves)) == 2
    with refuses(ValueError, 2, 2, 2):
        mask_truncated(halves, steps=2)

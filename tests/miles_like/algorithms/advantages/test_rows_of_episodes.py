"""Rows of an episode have its advantage, and a baseline counts the episode once.

The oracle of every advantage is itself, of the group in which each episode is one sample with the tokens of its rows.
Not covered: turn_credit, which refuses further rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from miles_like.algorithms.advantages.parts import InParts
from miles_like.algorithms.advantages.shuffle import shuffle_over_batch
from miles_like.algorithms.filters import nonzero_std
from miles_like.algorithms.registry import make_algorithm
from miles_like.algorithms.truncation import OverlongShaping
from miles_like.config.sections.algorithm import AlgorithmConfig, RolloutAlgorithm
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.config.sections.flat import names_of, parts_of
from miles_like.types import REFERENCE, VALUES, Sample, SampleGroup
from tests.support.made_samples import group, sample
from tests.support.refusals import refuses

ADVANTAGES = names_of(parts_of(RolloutAlgorithm)["advantage"])


def _of(prompt: str, *episodes: tuple[float, Sequence[int]]) -> SampleGroup:
    """Of each episode its reward, and the response lengths of its rows."""
    made, first = list[Sample](), 0
    for i, (reward, lengths) in enumerate(episodes):
        for row, n in enumerate(lengths):
            one = sample(prompt, i, response_len=n, reward=reward, first_token=first)
            values = torch.where(one.loss_mask, one.token_ids / 50, 0.0)
            made.append(replace(one, row=row, streams={VALUES: values, REFERENCE: -values / 3}))
            first += n + 2
    return group(made)


GROUPS = [
    _of("a", (1.0, [3, 1, 2]), (0.0, [2]), (0.5, [1, 4])),
    _of("b", (0.25, [2, 2]), (1.0, [5])),
]


def joined(of: SampleGroup) -> SampleGroup:
    """Each episode as one sample."""

    def cat(rows: Sequence[Sample]) -> Sample:
        tensors = {f: torch.cat([getattr(s, f) for s in rows]) for f in ("token_ids", "loss_mask", "logprobs")}
        streams = {name: torch.cat([s.streams[name] for s in rows]) for name in rows[0].streams}
        return replace(rows[0], **tensors, streams=streams)

    return replace(of, samples=tuple(map(cat, of.rows)))


def tokens(groups: Sequence[SampleGroup], advantages: Any) -> list[list[float]]:
    """Of each episode the advantages of its loss tokens."""
    out = []
    for g, of in zip(groups, advantages, strict=True):
        by_episode: dict[int, list[float]] = {}
        for s, a in zip(g.samples, of, strict=True):
            whole = a if isinstance(a, torch.Tensor) else torch.full((s.length,), a)
            by_episode.setdefault(s.index, []).extend(whole[s.loss_mask].tolist())
        out += by_episode.values()
    return out


@pytest.mark.parametrize("keys", [{}, {"kl_coefficient": 0.1, "kl_in": "reward"}], ids=["bare", "penalty"])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_rows_have_the_advantage_of_their_episode(name: str, keys: dict[str, Any]) -> None:
    """In parts as well. With a penalty, a token of reinforce_pp, ppo or remax has those of the later tokens of its row
    alone."""
    if keys and name in ("maxrl", "reinforce_pp", "ppo", "remax"):
        return
    algorithm = make_algorithm(AlgorithmConfig(advantage=name, **keys), CorrectionConfig())
    one = [joined(g) for g in GROUPS]
    found = algorithm.advantages(GROUPS)
    for a, b in zip(tokens(GROUPS, found), tokens(one, algorithm.advantages(one)), strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
    parts = algorithm.parts
    assert isinstance(parts, InParts)
    measured, numbers = parts.measure(GROUPS) if parts.measures else (GROUPS, [])
    assert tokens(GROUPS, parts.place(measured, parts.decide(GROUPS, numbers))) == tokens(GROUPS, found)


def test_a_group_s_baseline_by_hand() -> None:
    """Rewards 1, 0 and 1/2 of three episodes, not of six rows."""
    algorithm = make_algorithm(AlgorithmConfig(advantage="dr_grpo"), CorrectionConfig())
    assert algorithm.advantages(GROUPS[:1]) == [[0.5, 0.5, 0.5, -0.5, 0.0, 0.0]]


def test_rows_of_other_rewards_are_refused() -> None:
    wrong = replace(GROUPS[0], samples=(replace(GROUPS[0].samples[0], reward=0.0), *GROUPS[0].samples[1:]))
    with refuses(ValueError, "a/0", 3, 0.0, 1.0):
        make_algorithm(AlgorithmConfig(), CorrectionConfig()).advantages([wrong])
    credit = make_algorithm(AlgorithmConfig(turn_credit="discounted"), CorrectionConfig())
    with refuses(ValueError, "a/0.1", "algorithm.turn_credit", "episode"):
        credit.advantages(GROUPS)


def test_shuffled_advantages_stay_together() -> None:
    numbers = [[float(s.index) for s in g.samples] for g in GROUPS]
    for seed in range(8):
        for g, of in zip(GROUPS, shuffle_over_batch(GROUPS, numbers, seed=seed), strict=True):
            assert [len({of[g.samples.index(s)] for s in rows}) for rows in g.rows] == [1] * len(g.rows)
        dealt = zip(GROUPS, shuffle_over_batch(GROUPS, numbers, seed=seed), strict=True)
        assert sorted(a for g, of in dealt for s, a in zip(g.samples, of, strict=True) if not s.row) == [0, 0, 1, 1, 2]


def test_overlong_rows_lower_the_reward_of_their_episode_once() -> None:
    """By the longest: 3 of 4 tokens, of which the last 2 are penalized."""
    shaped = OverlongShaping(limit=4, buffer=2, factor=1.0).shape(GROUPS[0])
    assert [s.reward for s in shaped.samples] == [0.5, 0.5, 0.5, 0.0, -0.5, -0.5]


def test_a_group_of_one_reward_is_one_whatever_rows_it_has() -> None:
    assert nonzero_std(_of("c", (1.0, [1, 1]), (1.0, [2]))) is not None and nonzero_std(GROUPS[0]) is None

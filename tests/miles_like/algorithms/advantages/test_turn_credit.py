"""Advantages of single turns against a table by hand and against plain loops over statistics of the standard library.

Not covered: whether they make a model learn.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_like.algorithms.advantages.grpo import STD_EPS
from miles_like.algorithms.advantages.parts import InParts
from miles_like.algorithms.registry import make_algorithm
from miles_like.cluster.workers.holder import ColumnHolder
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.types import ENVIRONMENT, POLICY, Sample, SampleGroup, Span
from tests.support.made_samples import group, sample
from tests.support.refusals import Facts, refuses


def episode(index: int, rewards: list[float | None], *, beyond: float = 0.0) -> Sample:
    """Turns of two tokens, with an answer of one token between them. beyond: what the run's reward added."""
    spans = list[Span]()
    for i, r in enumerate(rewards):
        start = 2 + 3 * i
        spans.append(Span(who=POLICY, start=start, end=start + 2, reward=r))
        spans.append(Span(who=POLICY, start=start, end=start + 1, what="tool_call"))
        spans.append(Span(who=ENVIRONMENT, start=start + 2, end=start + 3))
    of = sample(index=index, response_len=3 * len(rewards), reward=sum(r or 0.0 for r in rewards) + beyond)
    mask = of.loss_mask.clone()
    mask[4::3] = False
    return replace(of, loss_mask=mask, spans=tuple(spans))


def turns_of(advantage: float | torch.Tensor, turns: int) -> list[float]:
    """One number a turn; the environment's tokens have none."""
    assert isinstance(advantage, torch.Tensor), "also of one turn: workers agree on what they hold"
    found = [advantage[2 + 3 * i : 4 + 3 * i].tolist() for i in range(turns)]
    assert all(a == b for a, b in found) and not advantage[:2].any() and not advantage[4::3].any()
    return [a for a, _ in found]


def credited(groups: list[SampleGroup], **keys: object) -> list[list[list[float]]]:
    algorithm = make_algorithm(AlgorithmConfig(**keys), CorrectionConfig())
    return [
        [turns_of(a, len(s.spans) // 3) for a, s in zip(of, g.samples, strict=True)]
        for of, g in zip(algorithm.advantages(groups), groups, strict=True)
    ]


TABLE = [group([episode(0, [1.0, 0.0, 2.0]), episode(1, [0.0, 4.0]), episode(2, [None], beyond=1.0)])]


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        # returns with a discount of 1/2: 1 + (0 + 2/2)/2 = 1.5, 1, 2; 0 + 4/2 = 2, 4; 1. Their mean: 11.5 / 6
        (
            {"turn_credit": "discounted", "turn_discount": 0.5},
            [[1.5 - 11.5 / 6, 1 - 11.5 / 6, 2 - 11.5 / 6], [2 - 11.5 / 6, 4 - 11.5 / 6], [1 - 11.5 / 6]],
        ),
        # first turns 1.5, 2, 1: mean 1.5; second 1, 4: mean 2.5; the third has no other
        ({"turn_credit": "turn_groups", "turn_discount": 0.5}, [[0.0, -1.5, 0.0], [0.5, 1.5], [-0.5]]),
        # rewards alone: first turns 1, 0, 1; second 0, 4
        ({"turn_credit": "turn_groups", "turn_discount": 0.0}, [[1 / 3, -2.0, 0.0], [-2 / 3, 2.0], [1 / 3]]),
        # sums of the rest: 3, 2, 2; 4, 4; 1
        ({"turn_credit": "turn_groups"}, [[3 - 8 / 3, -1.0, 0.0], [4 - 8 / 3, 1.0], [1 - 8 / 3]]),
    ],
)
def test_a_table_by_hand(keys: dict[str, object], want: list[list[float]]) -> None:
    (found,) = credited(TABLE, advantage="dr_grpo", **keys)
    assert [pytest.approx(of) for of in want] == found


def by_loops(rewards: list[list[float]], discount: float, by_number: bool) -> list[list[float]]:
    """As the definition, one turn at a time."""
    returns = [[sum(discount ** (k - t) * of[k] for k in range(t, len(of))) for t in range(len(of))] for of in rewards]

    def of_turn(i: int, t: int) -> float:
        others = [of[t] for of in returns if t < len(of)] if by_number else [r for of in returns for r in of]
        if len(others) < 2:
            return 0.0
        return (returns[i][t] - statistics.fmean(others)) / (statistics.stdev(others) + STD_EPS)

    return [[of_turn(i, t) for t in range(len(of))] for i, of in enumerate(returns)]


@given(
    rewards=st.lists(st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=4), min_size=1, max_size=5),
    discount=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    credit=st.sampled_from(["discounted", "turn_groups"]),
)
def test_loops_give_the_same(rewards: list[list[float]], discount: float, credit: str) -> None:
    groups = [group([episode(i, list(of)) for i, of in enumerate(rewards)])]
    (found,) = credited(groups, turn_credit=credit, turn_discount=discount)
    for a, b in zip(found, by_loops(rewards, discount, credit == "turn_groups"), strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)


def test_without_rewards_of_turns_each_has_what_the_episode_has() -> None:
    """With all turns of equal number, and so by grpo itself."""
    groups = [group([episode(i, [None, None], beyond=r) for i, r in enumerate([1.0, 0.0, 0.5])])]
    whole = make_algorithm(AlgorithmConfig(), CorrectionConfig()).advantages(groups)[0]
    (found,) = credited(groups, turn_credit="turn_groups")
    assert found == [pytest.approx([a, a], rel=1e-6) for a in whole]


class InThis:
    """Objects of this process."""

    def put(self, value: object) -> object:
        return value

    def get(self, reference: object) -> object:
        return reference


def test_parts_give_the_same_from_records() -> None:
    """The process that decides has records alone; the values of the tokens are elsewhere."""
    holder = ColumnHolder(0, InThis())  # type: ignore[arg-type]
    records = [replace(g, samples=holder.records(g)) for g in TABLE]
    algorithm = make_algorithm(AlgorithmConfig(turn_credit="discounted", turn_discount=0.5), CorrectionConfig())
    parts = algorithm.parts
    assert isinstance(parts, InParts) and not parts.measures and parts.places
    placed = parts.place(TABLE, parts.decide(records, []))
    for a, b in zip(placed[0], algorithm.advantages(TABLE)[0], strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"turn_credit": "discounted", "name": "ppo"}, ("discounted", "algorithm.advantage", "dr_grpo")),
        ({"turn_credit": "turn_groups", "name": "rloo"}, ("turn_groups", "algorithm.advantage")),
        ({"turn_credit": "discounted", "kl_coefficient": 0.1, "kl_in": "reward"}, ("algorithm.kl_in", "loss")),
        ({"turn_credit": "discounted", "shuffle_advantages": True}, ("algorithm.shuffle_advantages", "false")),
        ({"turn_discount": 0.5}, ("algorithm.turn_discount", 0.5, "algorithm.turn_credit", "episode")),
        ({"turn_credit": "turns"}, ("algorithm.turn_credit", "turns", "turn_groups")),
    ],
)
def test_where_turns_have_no_advantages_of_their_own_they_are_refused(given: dict[str, object], facts: Facts) -> None:
    with refuses(ValueError, *facts):
        AlgorithmConfig(**given)


def test_a_token_in_no_turn_is_refused() -> None:
    """Spans of a generate function may be wrong; a token without a turn would have no advantage."""
    of = episode(0, [1.0, 0.0, 2.0])
    short = replace(of, spans=tuple(s for s in of.spans if s.start < 8))
    with refuses(ValueError, "p/0", 2, 8, "algorithm.turn_credit", "episode"):
        credited([group([short, episode(1, [0.0, 4.0])])], turn_credit="discounted")

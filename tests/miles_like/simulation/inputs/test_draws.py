"""Draws depend on seed, purpose and group alone, and have the distribution that is asked for.

Oracle: numpy's and scipy-free closed forms of the moments.
"""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from miles_like.simulation.inputs.assumptions import LengthAssumptions, PublishAssumptions, RewardAssumptions
from miles_like.simulation.inputs.lengths import (
    Answers,
    DrawnAnswers,
    Purpose,
    RecordedAnswers,
    scoring_seconds,
    stream,
)
from tests.support.refusals import check_refusal


def drawn(limit: int = 10**9, n: int = 40_000, **given: object) -> np.ndarray:
    lengths = LengthAssumptions.model_validate({"mean": 500, "prompt_tokens": 9} | given)
    answers = DrawnAnswers(lengths=lengths, limit=limit).draw(stream(0, Purpose.LENGTHS), n)
    assert answers.prompt_tokens == 9
    return np.array(answers.lengths, float)


@pytest.mark.parametrize(
    ("kind", "deviation"),
    [("exponential", 500.0), ("geometric", 499.5), ("lognormal", 500 * np.sqrt(np.exp(0.64) - 1)), ("fixed", 0.0)],
)
def test_moments_are_the_distribution_s(kind: str, deviation: float) -> None:
    found = drawn(kind=kind, sigma=0.8)
    assert found.mean() == pytest.approx(500, rel=0.02)
    assert found.std() == pytest.approx(deviation, rel=0.05, abs=0.5)


def test_a_limit_cuts_lengths_off() -> None:
    found = drawn(limit=300)
    assert found.max() == 300 and found.min() >= 1
    assert (found == 300).mean() == pytest.approx(np.exp(-300 / 500), abs=0.01)


def test_answers_of_a_prompt_share_what_is_the_prompt_s() -> None:
    """The correlation of log lengths within a prompt is `of_prompt`."""
    source = DrawnAnswers(
        lengths=LengthAssumptions(kind="lognormal", mean=10_000, sigma=1.0, of_prompt=0.6, prompt_tokens=1),
        limit=10**9,
    )
    pairs = np.log([source.draw(stream(0, Purpose.LENGTHS, g), 2).lengths for g in range(6000)])
    assert np.corrcoef(pairs.T)[0, 1] == pytest.approx(0.6, abs=0.03)


def test_recorded_groups_stay_whole_and_are_drawn_with_replacement_in_another_size() -> None:
    recorded = [Answers(3, (1, 2, 3)), Answers(4, (70, 80, 90))]
    source = RecordedAnswers(recorded=recorded, limit=85)
    found = [source.draw(stream(0, Purpose.LENGTHS, g), 3) for g in range(40)]
    assert set(found) == {Answers(3, (1, 2, 3)), Answers(4, (70, 80, 85))}
    five = source.draw(stream(0, Purpose.LENGTHS), 5)
    assert len(five.lengths) == 5 and set(five.lengths) <= ({1, 2, 3} if five.prompt_tokens == 3 else {70, 80, 85})


def test_a_draw_is_of_its_group_whatever_was_drawn_before() -> None:
    source = DrawnAnswers(lengths=LengthAssumptions(mean=50, prompt_tokens=1), limit=1000)
    first = [source.draw(stream(7, Purpose.LENGTHS, g), 4) for g in range(6)]
    again = [source.draw(stream(7, Purpose.LENGTHS, g), 4) for g in reversed(range(6))]
    assert first == again[::-1] and len(set(first)) == 6
    assert source.draw(stream(8, Purpose.LENGTHS, 0), 4) != first[0]


def test_a_group_is_scored_with_its_slowest_sample() -> None:
    """The mean of the largest of n exponential times is H_n times their mean (Renyi 1953)."""
    reward = RewardAssumptions(mean_s=2.0, kind="exponential")
    found = np.mean([scoring_seconds(reward, 0, g, 8) for g in range(4000)])
    assert found == pytest.approx(2.0 * sum(1 / i for i in range(1, 9)), rel=0.03)
    assert scoring_seconds(RewardAssumptions(mean_s=2.0), 0, 5, 8) == 2.0


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValidationError) as lengths:
        LengthAssumptions(kind="lognormal", prompt_tokens=3)
    check_refusal(lengths.value.errors()[0]["msg"], "simulation.lengths.mean", "'lognormal'")
    with pytest.raises(ValidationError) as publish:
        PublishAssumptions(seconds=1.0, pause_s=2.0)
    check_refusal(publish.value.errors()[0]["msg"], "simulation.publish.pause_s", 2, 1)

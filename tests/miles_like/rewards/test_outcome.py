"""What a reward function may return, and what it may not.

A wrong value that is taken for a number trains without a word, so each is refused in one sentence.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from miles_like.rewards.outcome import each, outcome_of
from miles_like.types import Score, Unscored
from tests.support.refusals import Facts, refuses


@pytest.mark.parametrize(
    ("returned", "value", "parts"),
    [
        (1, 1.0, {}),
        (-0.5, -0.5, {}),
        (True, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        (np.bool_(True), 1.0, {}),
        (torch.tensor(0.25), 0.25, {}),
        (torch.tensor([2]), 2.0, {}),
        ({"score": 1, "form": 0.5}, 1.0, {"form": 0.5}),
        ({"reward": 1, "form": True}, 1.0, {"form": 1.0}),
        ({"score": 1, "reward": 2}, 1.0, {"reward": 2.0}),
        ({"right": 1, "form": 0.5}, 1.5, {"right": 1.0, "form": 0.5}),
        ({"score": 1, "pred": "24", "why": None, "form": 0}, 1.0, {"form": 0.0}),
        (Score(value=3.0), 3.0, {}),
    ],
)
def test_a_score(returned, value, parts):
    assert outcome_of(returned) == Score(value=value, parts=parts)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "the reward function returned None"),
        ({"score": None, "form": 1}, "the reward function returned None"),
        ({"score": None, "reason": " the sandbox is full\n"}, "the sandbox is full"),
        ({"reward": None, "reason": "x" * 500}, "x" * 120),
        ({"form": 1, "right": None}, "the reward function returned None"),
        ({"form": 1, "right": None, "reason": "no sandbox"}, "no sandbox"),
        (Unscored(reason="mine"), "mine"),
    ],
)
def test_no_score_has_a_reason(returned, reason):
    assert outcome_of(returned) == Unscored(reason=reason)


@pytest.mark.parametrize(
    ("returned", "facts"),
    [
        ("1", ("'1'",)),
        (b"1", ("b'1'",)),
        ([1.0], ("[1.0]",)),
        (1j, ("1j",)),
        (torch.zeros(2), ("tensor([0., 0.])",)),
        (float("nan"), ("nan",)),
        (-float("inf"), ("-inf",)),
        (10**400, (10**400,)),
        (torch.tensor(float("nan")), ("nan",)),
        ({"score": "1"}, ("'score'", "'1'")),
        ({"score": float("inf")}, ("score", "inf")),
        ({"score": 1, "form": float("nan")}, ("form", "nan")),
        ({"score": 1, "form": [1]}, ("form", "[1]")),
        ({}, ("score", "{}")),
        ({"pred": "24"}, ("score", "pred")),
    ],
)
def test_anything_else_is_refused(returned, facts: Facts):
    with refuses(ValueError, *facts):
        outcome_of(returned)


def test_results_of_a_batch_are_as_many_as_its_samples():
    for two in ([1, None], (1, 2), np.array([1, 2]), torch.tensor([[1.0], [2.0]])):
        assert len(each(two, 2)) == 2
    with refuses(ValueError, 3, 2):
        each([1, 2, 3], 2)
    for wrong in (1.0, None, "ab", {"a": 1, "b": 2}):
        with refuses(ValueError, 2):
            each(wrong, 2)


def test_a_score_that_is_not_finite_cannot_be_made():
    """A part of the user's own Score goes to a metric."""
    with refuses(ValueError, "form"):
        Score(value=1.0, parts={"form": float("nan")})

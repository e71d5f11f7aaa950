"""Several rewards as one: their weighted sum, each part logged.

Not covered: how a configuration names them (test_reward_config.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from miles_like.rewards.weighted import Weighted
from miles_like.types import Score, Unit, Unscored
from tests.miles_like.rewards.test_scorer import asked, patient
from tests.support.refusals import refuses


def test_parts_are_weighted_and_each_is_logged() -> None:
    """One part that has no score leaves the sample without one: the sum of the rest would be another reward."""

    def right(prompt, sample):
        return None if sample.index == 2 else float(sample.index)

    def form(prompt, samples):
        return [{"score": 0.5, "tags": 1} for _ in samples]

    reward = Weighted({"right": (patient(right, retries=0), 1.0), "form": (patient(form), 0.2)})
    assert reward.unit is Unit.GROUP and not reward.slow
    assert asked(reward, n=3) == [
        Score(value=0.1, parts={"right": 0.0, "form": 0.5, "form/tags": 1.0}),
        Score(value=1.1, parts={"right": 1.0, "form": 0.5, "form/tags": 1.0}),
        Unscored(reason="right: the reward function returned None"),
    ]


def test_a_part_that_is_only_logged_costs_no_sample() -> None:
    def seen(prompt, sample):
        return None if sample.index else 0.5

    parts = {"right": (patient(lambda prompt, sample: 1.0), 1.0), "seen": (patient(seen, retries=0), 0.0)}
    assert asked(Weighted(parts), n=2) == [
        Score(value=1.0, parts={"right": 1.0, "seen": 0.5}),
        Score(value=1.0, parts={"right": 1.0}),
    ]


def test_parts_are_asked_at_the_same_time_and_the_first_error_ends_all() -> None:
    """Each waits for the other to begin."""
    began = [asyncio.Event(), asyncio.Event()]

    def meets(i: int) -> Callable[..., Any]:
        async def function(prompt, sample):
            began[i].set()
            await began[1 - i].wait()
            if i:
                raise KeyError("second")
            await asyncio.Event().wait()

        return function

    reward = Weighted({str(i): (patient(meets(i), timeout_s=3600), 1.0) for i in range(2)})
    with refuses(RuntimeError, "KeyError", "second"):
        asked(reward, n=1)

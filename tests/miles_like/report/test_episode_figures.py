"""What episodes have cost, by hand; and the spans in the file of samples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from miles_like.report.episodes import episode_metrics
from miles_like.report.metrics import TIMINGS, write_rollouts
from miles_like.types import ENVIRONMENT, POLICY, Span
from tests.support.made_samples import group, sample

MASK = torch.tensor([False, False, True, True, False, False, True, True])


def turn(who: str, start: int, end: int, seconds: float, **more: object) -> Span:
    return Span(who=who, start=start, end=end, seconds=seconds, **more)  # type: ignore[arg-type]


def test_figures_of_episodes_by_hand() -> None:
    """Turns of 1 s and 2 s, answers of 3 s and of 0.5 s; three calls, of which one was not made and one failed."""
    spans = (
        turn(POLICY, 2, 4, 1.0),
        turn(POLICY, 2, 3, 0.0, what="tool_call", name="add", status="ok"),
        turn(POLICY, 3, 4, 0.0, what="tool_call", name="ad", status="unknown tool"),
        turn(ENVIRONMENT, 4, 6, 3.0),
        turn(ENVIRONMENT, 4, 6, 0.0, what="tool_result", name="add", status="timeout"),
        turn(POLICY, 6, 8, 2.0, reward=0.5),
        turn(POLICY, 6, 8, 0.0, what="tool_call", name="add"),
        turn(ENVIRONMENT, 8, 8, 0.5),
    )
    two = replace(sample(response_len=6), loss_mask=MASK, spans=spans)
    assert episode_metrics([group([two, sample(index=1)])]) == {
        "rollout/turns/mean": 1.5,
        "rollout/turns/max": 2.0,
        "rollout/tokens/policy": 7.0,
        "rollout/tokens/environment": 2.0,
        "rollout/tool/calls": 3.0,
        "rollout/tool/errors": 2.0,
        "rollout/environment_s/mean": 1.75,
        "rollout/environment_s/p99": 3.0,
        "rollout/environment_s/share": pytest.approx(3.5 / 6.5),
    }


def test_the_rows_of_an_episode_are_counted_and_its_turns_added_up() -> None:
    rows = [replace(sample(response_len=6), loss_mask=MASK), replace(sample(), row=1)]
    found = episode_metrics([group([*rows, sample(index=1)])])
    assert (found["rollout/rows/mean"], found["rollout/turns/max"], found["rollout/turns/mean"]) == (1.5, 3.0, 2.0)


def test_without_a_clock_there_are_no_seconds() -> None:
    """So runs of the same bits have the same rows; those of others are left out where rows are compared."""
    untimed = (turn(POLICY, 2, 4, 0.0), turn(ENVIRONMENT, 4, 6, 0.0), turn(POLICY, 6, 8, 0.0))
    found = episode_metrics([group([replace(sample(response_len=6), loss_mask=MASK, spans=untimed)])])
    assert not [key for key in found if "_s/" in key or "tool" in key]
    assert "rollout/environment_s/mean".startswith(TIMINGS)


def test_the_file_of_samples_has_spans_as_objects_where_there_are_any(tmp_path: Path) -> None:
    one = replace(sample(reward=1.0), spans=(turn(POLICY, 2, 5, 0.25, reward=1.0),))
    write_rollouts(tmp_path / "step_1.jsonl", [group([one, sample(index=1, reward=0.0)])])
    first, second = map(json.loads, (tmp_path / "step_1.jsonl").read_text().splitlines())
    assert first["spans"] == [
        {
            "who": "policy",
            "start": 2,
            "end": 5,
            "what": "turn",
            "name": "",
            "status": "",
            "reward": 1.0,
            "seconds": 0.25,
        }
    ]
    assert "spans" not in second

"""Spans of sampling and scoring: a span for each request and each reward that takes time, with the keys of the samples
and the weight versions that sampled them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_like import spans
from miles_like.report.traces.parts import Parts
from miles_like.rewards.load import scored_by
from miles_like.types import Prompt, Sample, SamplingParams
from rollout.episodes.groups import run_groups
from tests.support.fakes import FakeEngine, make_prompt

PROMPTS = [make_prompt("a"), make_prompt("b")]


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    spans.begin(tmp_path, "driver")
    yield Parts(tmp_path, lambda host: 0)
    spans.end()


def test_each_sample_is_in_a_request_and_in_a_reward(parts: Parts) -> None:
    """Rewards that are there at once are left out: a step has thousands of them."""

    async def slow_for_b(prompt: Prompt, sample: Sample) -> float:
        await asyncio.sleep(0.01 if prompt.id == "b" else 0)
        return 1.0

    engine, params = FakeEngine(version=3, delay_s=0.001), SamplingParams(max_new_tokens=4)
    asyncio.run(run_groups(engine, PROMPTS, scored_by(slow_for_b), n=2, params=params))
    spans.flush()
    found = parts.new()
    scored = [s for s in found if s.name == "reward" and s.took >= 10_000_000]
    assert sorted(name for s in scored for name in s.args["samples"]) == ["b/0", "b/1"]
    assert all(s.beside and s.args["versions"] == [3] for s in scored)
    sampled = [s for s in found if s.name == "generate"]
    assert len(sampled) == 2
    for span in sampled:
        assert span.args["versions"] == [3] and len(span.args["tokens"]) == len(span.args["samples"])

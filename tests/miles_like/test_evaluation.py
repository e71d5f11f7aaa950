"""Held-out prompts: asked as they are to be, scored, and forgotten by the servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from miles_like.evaluation import evaluate
from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams
from tests.fakes import FakeEngine, make_prompt

PARAMS = SamplingParams(max_new_tokens=4, temperature=0.7, top_p=0.9, top_k=5, sampling_seed=3)


class Cached(FakeEngine):
    """Notes whether prompts that it was given may still be in its cache."""

    cached = False
    params: SamplingParams | None = None

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> list[SampleGroup]:
        self.cached, self.params = True, params
        return await super().generate(prompts, n=n, params=params)

    async def flush_cache(self) -> None:
        self.cached = False


async def _right_if_first(prompt: Prompt, sample: Sample) -> float:
    return float(sample.index == 0)


def _evaluated(engines: Sequence[Cached], *, n: int, prompts: int = 3, alone: bool = True) -> dict[str, float]:
    asked = [make_prompt(f"p{i}") for i in range(prompts)]
    how = {"n": n, "params": PARAMS, "name": "held", "alone": alone}
    return asyncio.run(evaluate(engines, asked, _right_if_first, **how))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n", "temperature", "found"), [(1, 0.0, {"avg@1": 1.0}), (2, 0.7, {"avg@2": 0.5, "pass@2": 1.0})]
)
def test_one_answer_is_the_best_several_are_drawn(n: int, temperature: float, found: dict[str, float]) -> None:
    engine = Cached()
    assert _evaluated([engine], n=n) == {f"eval/held/{k}": v for k, v in found.items()}
    assert engine.params is not None and engine.params.temperature == temperature
    assert (engine.params.top_p, engine.params.top_k, engine.params.sampling_seed) == (1.0, -1, 3)


def test_what_comes_next_does_not_find_the_prompts_in_a_cache() -> None:
    """Else a run that goes on from a checkpoint, which evaluates first, could sample other last bits."""
    engines = [Cached(), Cached()]
    _evaluated(engines, n=1)
    assert all(e.params is not None and not e.cached for e in engines)


def test_a_cache_is_left_alone_while_others_sample() -> None:
    engine = Cached()
    _evaluated([engine], n=1, alone=False)
    assert engine.cached


def test_no_prompts_are_no_metrics() -> None:
    assert _evaluated([Cached()], n=1, prompts=0) == {}

"""Search by a reward: the best of n answers against every subset of n, beams against a search written out.

An engine over a table of next tokens stands for the model. Not covered: real servers (tests/miles_like/run/
test_evaluate.py).
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_like.loop.search import Search, beam_figures, beam_search, best_of, best_of_figures, with_scores
from miles_like.rewards.load import scored_by
from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams
from rollout.seeds import seed_of
from tests.support.made_samples import group, sample
from tests.support.refusals import refuses

PARAMS = SamplingParams(max_new_tokens=6, sampling_seed=1)
END = 9


@given(answers=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=6), data=st.data())
def test_the_best_of_n_is_the_mean_over_all_subsets(answers: list[tuple[int, int]], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(answers)))
    want = []
    for chosen in itertools.combinations(answers, n):
        top = max(score for score, _ in chosen)
        want.append(statistics.fmean(reward for score, reward in chosen if score == top))
    got = best_of([float(s) for s, _ in answers], [float(r) for _, r in answers], n)
    assert got == pytest.approx(statistics.fmean(want), abs=1e-12)


def selecting(fn: Any, n: int = 4, **how: Any) -> Search:
    return Search(best_of=n, by="own:worth", selector=scored_by(fn), **how)


def test_figures_of_the_best_of_n() -> None:
    """A perfect selector finds what pass@n counts, one that knows nothing the mean; an answer without a score or a
    reward counts in neither."""
    groups = [
        group([sample(f"p{p}", i, reward=r, text=str(r)) for i, r in enumerate(rewards)])
        for p, rewards in enumerate([(1.0, 0.0, 0.0, 0.0), (0.0, 1.0, None, 0.0)])
    ]

    def perfect(prompt: Prompt, sample: Sample) -> float | None:
        return None if sample.text == "None" else float(sample.text)

    scored = asyncio.run(with_scores(groups, selecting(perfect)))
    assert [s.reward_parts.get("by/worth") for s in scored[1].samples] == [0.0, 1.0, None, 0.0]
    found = best_of_figures(scored, selecting(perfect), "s")
    assert found == pytest.approx(
        {"eval/s/best@1": (1 / 4 + 1 / 3) / 2, "eval/s/best@2": (1 / 2 + 2 / 3) / 2, "eval/s/best@4": 1.0}
        | {"eval/s/best_tokens": 12.0}
    )
    blind = asyncio.run(with_scores(groups, selecting(lambda prompt, sample: 0.0)))
    found = best_of_figures(blind, selecting(perfect), "s")
    assert found["eval/s/best@1"] == pytest.approx(found["eval/s/best@2"])


class Tables:
    """An engine whose token at each place is a hash of seed, prompt, index of the sample and place; some end it."""

    def __init__(self) -> None:
        self.sampled = 0
        self.at_once: list[int] = []
        self.in_flight = self.most = 0

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> list[SampleGroup]:
        self.at_once.append(n)
        return [
            SampleGroup(
                prompt=p, samples=tuple(self._longer(sample(p.id, i, response_len=0), params) for i in range(n))
            )
            for p in prompts
        ]

    async def continue_sample(self, s: Sample, environment: Sequence[int] = (), *, params: SamplingParams) -> Sample:
        assert s.finish is not Finish.STOP
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        return self._longer(s, params)

    def _longer(self, s: Sample, params: SamplingParams) -> Sample:
        finish = Finish.LENGTH
        for _ in range(params.max_new_tokens):
            token = seed_of(params.sampling_seed or 0, s.prompt_id, 100 * s.index + len(s.token_ids)) % 10
            self.sampled += 1
            new = {
                "token_ids": torch.cat([s.token_ids, torch.tensor([token])]),
                "loss_mask": torch.cat([s.loss_mask, torch.tensor([True])]),
                "logprobs": torch.cat([s.logprobs, torch.zeros(1)]),
            }
            s = replace(s, **new)  # type: ignore[arg-type]
            if token == END:
                finish = Finish.STOP
                break
        return replace(s, finish=finish, text=" ".join(map(str, s.token_ids[s.loss_mask].tolist())))


def worth(prompt: Prompt, sample: Sample) -> float:
    """Of a partial answer too: the sum of its tokens."""
    return float(sum(map(int, sample.text.split())))


def by_hand(prompt: Prompt, budget: int, width: int, step: int) -> tuple[str, int]:
    """The answer, and the tokens sampled for it."""
    engine, params = Tables(), replace(PARAMS, max_new_tokens=step)
    live = [engine._longer(sample(prompt.id, i, response_len=0), params) for i in range(budget)]
    number = 0
    while True:
        kept: list[Sample] = []
        for s in sorted(live, key=lambda s: -worth(prompt, s)):
            if len(kept) < width and all(s.token_ids.tolist() != k.token_ids.tolist() for k in kept):
                kept.append(s)
        live = kept
        done = [s.finish is Finish.STOP or s.response_len >= PARAMS.max_new_tokens for s in live]
        if all(done):
            return live[0].text, engine.sampled
        number += 1
        params = replace(params, sampling_seed=seed_of(1, f"beam {number}"))
        next_ones: list[Sample] = []
        for s, ended in zip(live, done, strict=True):
            for _ in range(1 if ended else budget // len(live)):
                at = replace(s, index=len(next_ones))
                left = min(step, PARAMS.max_new_tokens - s.response_len)
                next_ones.append(at if ended else engine._longer(at, replace(params, max_new_tokens=left)))
        live = next_ones


@pytest.mark.parametrize(("budget", "width", "step"), [(8, 2, 2), (8, 4, 1), (4, 1, 4), (4, 2, 6)])
def test_beams_are_those_of_a_search_written_out(budget: int, width: int, step: int) -> None:
    prompts = [Prompt(id=f"p{i}", token_ids=(1, 2), answer="") for i in range(5)]
    engine, search = Tables(), selecting(worth, 8, beams=width, step_tokens=step)
    chosen, tokens = asyncio.run(beam_search(engine, prompts, search, budget=budget, params=PARAMS))  # type: ignore[arg-type]
    want = [by_hand(p, budget, width, step) for p in prompts]
    assert [s.text for s in chosen] == [text for text, _ in want]
    assert tokens == statistics.fmean(n for _, n in want) == engine.sampled / 5
    assert tokens <= budget * PARAMS.max_new_tokens
    alone, _ = asyncio.run(beam_search(Tables(), prompts[2:3], search, budget=budget, params=PARAMS))  # type: ignore[arg-type]
    assert alone[0].text == chosen[2].text, "a prompt's answer depends on the others"


def test_beams_are_measured_by_the_set_s_reward_at_each_budget() -> None:
    prompts = [Prompt(id=f"p{i}", token_ids=(1, 2), answer="") for i in range(5)]
    search = selecting(worth, 8, beams=2, step_tokens=2)
    engine: Any = Tables()
    length = scored_by(lambda prompt, sample: float(len(sample.text.split())))
    found = asyncio.run(beam_figures(engine, prompts, search, length, params=PARAMS, name="s"))
    assert engine.at_once == [4, 8]
    for n in (4, 8):
        chosen, tokens = asyncio.run(beam_search(Tables(), prompts, search, budget=n, params=PARAMS))  # type: ignore[arg-type]
        assert found[f"eval/s/beam@{n}"] == statistics.fmean(s.response_len for s in chosen)
        assert found[f"eval/s/beam_tokens@{n}"] == tokens
    assert not asyncio.run(beam_figures(engine, prompts, selecting(worth), length, params=PARAMS, name="s"))


def test_continuations_in_flight_are_bounded() -> None:
    prompts = [Prompt(id=f"p{i}", token_ids=(1, 2), answer="") for i in range(200)]
    engine: Any = Tables()
    search = selecting(lambda prompt, sample: -worth(prompt, sample), 8, beams=4, step_tokens=2)
    asyncio.run(beam_search(engine, prompts, search, budget=8, params=PARAMS))
    assert engine.most == 256


def test_numbers_that_leave_no_choice_are_refused() -> None:
    with refuses(ValueError, 1, 2):
        selecting(worth, 1)
    with refuses(ValueError, 3, 4, 2):
        selecting(worth, 4, beams=3)
    with refuses(ValueError, 5, 3):
        best_of([1.0] * 3, [1.0] * 3, 5)

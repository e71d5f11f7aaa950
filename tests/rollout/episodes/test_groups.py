"""Sampling and scoring of groups."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from miles_like.config.sections.reward import RewardConfig
from miles_like.rewards.load import scored_by
from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams, Unit
from rollout.concurrency import all_or_first_error, as_completed
from rollout.episodes.groups import groups_as_completed, run_groups
from tests.support.fakes import FakeEngine, make_prompt
from tests.support.refusals import refuses

PARAMS = SamplingParams(max_new_tokens=4)
PROMPTS = [make_prompt("a"), make_prompt("b")]


async def by_index(prompt: Prompt, sample: Sample) -> float:
    return (10 if prompt.id == "b" else 0) + sample.index


def test_every_sample_gets_its_own_reward() -> None:
    """A reward on another sample's place would push the wrong tokens; the engine's samples are left as they are."""
    groups = asyncio.run(run_groups(FakeEngine(), PROMPTS, scored_by(by_index), n=3, params=PARAMS))
    assert [g.prompt.id for g in groups] == ["a", "b"]
    assert [g.rewards for g in groups] == [[0, 1, 2], [10, 11, 12]]


@pytest.mark.parametrize("unit", list(Unit))
def test_a_sample_that_has_a_reward_is_not_scored_again(unit: Unit) -> None:
    """Its environment gave it; the function that scores the others is not called for it, also for groups or batches."""

    class Played(FakeEngine):
        async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> list[SampleGroup]:
            groups = await super().generate(prompts, n=n, params=params)
            return [replace(g, samples=(replace(g.samples[0], reward=-7.0), *g.samples[1:])) for g in groups]

    def of_group(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        assert samples and all(s.index for s in samples)
        return [float(s.index) for s in samples]

    def of_batch(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[float]:
        return of_group(prompts[0], samples)

    reward = scored_by({Unit.SAMPLE: by_index, Unit.GROUP: of_group, Unit.BATCH: of_batch}[unit])
    groups = asyncio.run(run_groups(Played(), PROMPTS[:1], reward, n=3, params=PARAMS))
    assert [g.rewards for g in groups] == [[-7, 1, 2]]


def test_rewards_run_at_the_same_time() -> None:
    """A reward may be a remote call: none of these ends before all have begun."""
    all_of_them = asyncio.Barrier(20 * len(PROMPTS))

    async def slow(prompt: Prompt, sample: Sample) -> float:
        await all_of_them.wait()
        return 1

    asyncio.run(asyncio.wait_for(run_groups(FakeEngine(), PROMPTS, scored_by(slow), n=20, params=PARAMS), 120))


def test_a_failing_reward_names_prompt_and_sample() -> None:
    """Never a silent 0: the policy would be taught that a correct answer is wrong."""

    async def broken(prompt: Prompt, sample: Sample) -> float:
        if (prompt.id, sample.index) == ("b", 1):
            raise KeyError("grade")
        return 1.0

    with refuses(RuntimeError, "b", 1, "KeyError", "grade", "b:1"):
        asyncio.run(run_groups(FakeEngine(), PROMPTS, scored_by(broken), n=2, params=PARAMS))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", b"1", [1.0]])
def test_a_reward_that_is_no_number_is_refused(value: object) -> None:
    """A NaN would spread over its whole group's advantages."""

    async def odd(prompt: Prompt, sample: Sample) -> float:
        return value  # type: ignore[return-value]

    with refuses(RuntimeError, "a", 0):
        asyncio.run(run_groups(FakeEngine(), PROMPTS, scored_by(odd), n=1, params=PARAMS))


def test_aborted_samples_go_on_and_are_scored_whole() -> None:
    """Each with what is left of its budget and the seed it had: its stream of random numbers goes on. Aborted before
    its first token, it starts again from its prompt."""
    engine = FakeEngine(aborts=3)
    params = replace(PARAMS, sampling_seed=5)
    groups = asyncio.run(run_groups(engine, PROMPTS, scored_by(by_index), n=2, params=params))
    whole = asyncio.run(run_groups(FakeEngine(), PROMPTS, scored_by(by_index), n=2, params=params))
    assert [g.rewards for g in groups] == [[0, 1], [10, 11]]
    for got, want in zip(groups, whole, strict=True):
        assert [s.name for s in got.samples] == [s.name for s in want.samples]
        assert [s.token_ids.tolist() for s in got.samples] == [s.token_ids.tolist() for s in want.samples]
    assert sorted(engine.continued) == [
        (f"{prompt}/{i}", 3 + done, replace(params, max_new_tokens=4 - done))
        for prompt in "ab"
        for i in range(2)
        for done in range(3)
    ]


def test_a_sample_that_goes_on_in_vain_is_named_not_scored() -> None:
    """Its end is ours, not the policy's choice; and a server that ends all it is given is not asked for ever. Each says
    three tokens, one at a time, before it comes back with nothing new twice."""
    engine = FakeEngine(aborts=9)
    with refuses(RuntimeError, "a/0", 2):
        asyncio.run(run_groups(engine, PROMPTS, scored_by(by_index), n=2, params=PARAMS, resumes=2))
    assert len(engine.continued) == 4 * (3 + 2)


@pytest.mark.parametrize(
    ("limit", "stops", "tokens", "finish"),
    [(2, (), [5, 6], Finish.LENGTH), (9, (6,), [5, 6], Finish.STOP), (9, (7,), [5, 6, 7], Finish.STOP)],
)
def test_an_abort_with_the_last_token_is_no_abort(
    limit: int, stops: tuple[int, ...], tokens: list[int], finish: Finish
) -> None:
    """Stock SGLang checks for an abort before it looks at the token. To go on after a stop token, or with no token left
    to sample, would be another sample. The fake has sampled 5 and 6 by its third abort; before the first, 7 is the last
    token of its prompt, and it goes on."""
    params = SamplingParams(max_new_tokens=limit, stop_token_ids=stops)
    call = run_groups(FakeEngine(aborts=3), PROMPTS[:1], scored_by(by_index), n=1, params=params, resumes=1)
    (group,) = asyncio.run(call)
    assert group.samples[0].token_ids.tolist() == [5, 6, 7, *tokens]
    assert group.samples[0].finish is finish


def test_a_sample_that_nobody_could_score_leaves_its_group_with_a_reason() -> None:
    """Never a 0. The others keep their order and places; a group may lose all."""

    def some(prompt: Prompt, sample: Sample) -> object:
        if prompt.id == "b":
            return {"score": None, "reason": "no sandbox"}
        return None if sample.index == 1 else {"score": sample.index, "form": 0.5}

    reward = scored_by(some, RewardConfig(name="m:f", retries=0))
    kept, lost = asyncio.run(run_groups(FakeEngine(), PROMPTS, reward, n=3, params=PARAMS))
    assert [(s.index, s.reward, dict(s.reward_parts)) for s in kept.samples] == [
        (0, 0, {"form": 0.5}),
        (2, 2, {"form": 0.5}),
    ]
    assert kept.discarded == {"the reward function returned None": 1}
    assert (lost.prompt.id, lost.samples, lost.discarded) == ("b", (), {"no sandbox": 3})


def test_a_slow_reward_is_asked_while_others_are_sampled() -> None:
    """Prompt b is not answered before a's reward has been asked; a function that must see all of them has to wait."""
    asked = asyncio.Event()

    class Waits(FakeEngine):
        async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> list[SampleGroup]:
            if "b" in [p.id for p in prompts]:
                await asyncio.wait_for(asked.wait(), 20)
            return await super().generate(prompts, n=n, params=params)

    async def slow(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        asked.set()
        return [10.0 * (prompt.id == "b") + s.index for s in samples]

    async def batch(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[float]:
        return [10.0 * (p.id == "b") + s.index for p, s in zip(prompts, samples, strict=True)]

    groups = asyncio.run(run_groups(Waits(), PROMPTS, scored_by(slow), n=2, params=PARAMS))
    assert [g.rewards for g in groups] == [[0, 1], [10, 11]]
    engine = FakeEngine()
    groups = asyncio.run(run_groups(engine, PROMPTS, scored_by(batch), n=2, params=PARAMS))
    assert [g.rewards for g in groups] == [[0, 1], [10, 11]]


class Unequal(FakeEngine):
    """Prompt a takes for ever, the others no time."""

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> list[SampleGroup]:
        self.delay_s = 60.0 if "a" in [p.id for p in prompts] else 0.0
        return await super().generate(prompts, n=n, params=params)


def test_a_group_that_ends_is_there_at_once_and_who_has_enough_leaves_nothing_behind() -> None:
    """Over-sampling takes the first that end. The index is of the prompt; a task that went on would hold its request
    and its reward's processes for a discarded result."""
    engine = Unequal()

    async def first() -> None:
        mine = asyncio.all_tasks()
        groups = groups_as_completed(engine, PROMPTS, scored_by(by_index), n=2, params=PARAMS, prompt_per_request=True)
        async with aclosing(groups) as found:
            async for i, group in found:
                assert (i, group.prompt.id, group.rewards) == (1, "b", [10, 11])
                assert engine.under_way == 1
                break
        assert asyncio.all_tasks() == mine and engine.under_way == 0

    asyncio.run(first())


def test_cancelled_in_the_middle_it_leaves_no_task() -> None:
    """With the reward of one group under way, the other group still sampled."""
    engine = Unequal()

    async def never(prompt: Prompt, sample: Sample) -> float:
        await asyncio.sleep(60)
        return 0

    async def cut() -> None:
        mine = asyncio.all_tasks()
        call = asyncio.create_task(
            run_groups(
                engine, PROMPTS, scored_by(never), n=2, params=PARAMS, prompt_per_request=True
            )  # both requests at once
        )
        while engine.asked != ["a", "b"] or engine.under_way > 1:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert asyncio.all_tasks() == mine and engine.under_way == 0

    asyncio.run(cut())


@pytest.mark.parametrize("together", [all_or_first_error, as_completed])
def test_of_several_errors_the_first_is_raised_and_none_is_left_unread(together: Any) -> None:
    """asyncio tells of those when they are collected, at any moment, in the middle of whatever the run does then."""
    unread: list[object] = []

    async def broken(name: str) -> None:
        raise KeyError(name)

    async def all_fail() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unread.append(context))
        calls = together(broken(name) for name in "ab")
        with refuses(KeyError, "a"):
            await (calls if together is all_or_first_error else anext(calls))
        gc.collect()

    asyncio.run(all_fail())
    assert not unread


def test_groups_are_the_same_however_they_are_asked_for() -> None:
    """One request, or one for each prompt."""
    apart = asyncio.run(
        run_groups(FakeEngine(), PROMPTS, scored_by(by_index), n=3, params=PARAMS, prompt_per_request=True)
    )
    assert [(g.prompt.id, g.rewards) for g in apart] == [("a", [0, 1, 2]), ("b", [10, 11, 12])]
    engine = FakeEngine()
    asyncio.run(run_groups(engine, PROMPTS, scored_by(by_index), n=3, params=PARAMS))
    assert engine.asked == ["a", "b"] and not engine.continued

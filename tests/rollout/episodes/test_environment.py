"""Episodes against engines in this process: turns, limits, aborts, and what an environment may get wrong.

Not covered: log-probs and routes of an episode (tests/laws/test_episodes.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from miles_like.protocols import RolloutEngine
from miles_like.types import Finish, Observation, Prompt, Sample, SampleGroup, SamplingParams
from rollout.episodes.custom_generate import CustomGenerate
from rollout.episodes.resuming import ResumingEngine
from tests.support.refusals import Facts, refuses
from tests.support.talker import PARAMS, PROMPT, Talker, played, text_of, transcript


class Echo:
    """Ends at "24", otherwise repeats the reply. Records the seeds."""

    made: list[Any]

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        type(self).made.append((prompt.id, seed))

    def __call__(self, sample: Sample, reply: str) -> Observation:
        return Observation(ends=True, reward=0.5) if reply == "24" else Observation(text=f"<{reply}>")


@pytest.fixture(autouse=True)
def none_made_yet() -> None:
    Echo.made = []


def test_turns_follow_each_other_until_the_environment_ends_them() -> None:
    """None of the environment's tokens is under loss; each episode has an environment with a separate seed, which is
    the same in the next run."""
    engine = Talker("7", "8+9", "24")
    a, b = played(engine, Echo, n=2)
    assert transcript(a) == transcript(b) == "7<7>8+9<8+9>24"
    assert text_of(a.token_ids[a.loss_mask].tolist()) == "78+924" and a.response_len == 9
    assert (a.finish, a.reward, engine.asked) == (Finish.STOP, 0.5, ["p"])
    (_, first), (_, second) = Echo.made
    assert first != second
    played(Talker("24"), Echo, n=1)
    assert Echo.made[2] == ("p", first)


@pytest.mark.parametrize(
    ("limits", "text", "asked"),
    [
        ({"turns": 2}, "7<7>8+9", [("<7>", 6)]),  # the last turn is answered too, but there is no turn after it
        ({"turns": 1}, "7", []),
        ({"tokens": 5}, "7", []),  # 2 sampled and 3 fed tokens leave no budget
        ({"tokens": 7}, "7<7>8+", [("<7>", 2)]),  # and here 2 tokens, which do not end the turn
        ({"max_new_tokens": 2}, "7<7>8+", [("<7>", 2)]),
    ],
)
def test_limits_cut_an_episode(limits: dict[str, int], text: str, asked: list[tuple[str, int]]) -> None:
    """It ends as a sample does at the token limit, never longer than it may be, and without a word of the
    environment's after it. The run's reward is to score it."""
    engine = Talker("7", "8+9", "10", "24")
    (sample,) = played(engine, Echo, **limits)
    assert (transcript(sample), sample.finish, sample.reward) == (text, Finish.LENGTH, None)
    assert engine.fed == asked and bool(sample.loss_mask[-1])
    assert len(sample.token_ids) - len(PROMPT.token_ids) <= limits.get("tokens", 60)


@pytest.mark.parametrize("aborts", [1, 2, 3])
def test_a_turn_that_was_aborted_is_the_one_that_was_not(aborts: int) -> None:
    """Before its first token it is fed the environment's tokens again, after that not; each has its own budget. The
    third abort of "7" comes with its end: that turn is whole."""
    (whole,) = played(Talker("7", "8+9", "24"), Echo)
    engine = Talker("7", "8+9", "24", aborts=aborts)
    (sample,) = played(engine, Echo)
    assert transcript(sample) == transcript(whole) and sample.loss_mask.tolist() == whole.loss_mask.tolist()
    assert [fed for fed, _ in engine.fed].count("<7>") == 2  # its own call, and after the abort without a word
    assert min(left for _, left in engine.fed) == 6 - max(0, aborts - 1)


def test_a_turn_that_is_always_aborted_is_named() -> None:
    """With nothing new each time; one that says a token more each time comes to its end."""

    class Stopped(Talker):
        async def continue_sample(self, sample: Sample, *_: Any, **__: Any) -> Sample:
            return replace(sample, finish=Finish.ABORT)

    with refuses(RuntimeError, "p/0", 3):
        played(Stopped("8+9+1", aborts=1), Echo)


def test_an_environment_may_wait_and_give_tokens() -> None:
    async def answer(sample: Sample, text: str) -> Observation:
        await asyncio.sleep(0)
        return Observation(token_ids=(60, 61)) if sample.response_len < 4 else Observation(ends=True)

    (sample,) = played(Talker("7", "8+9"), lambda prompt, *, seed: answer)
    assert transcript(sample) == "7<=8+9" and sample.reward is None and sample.finish is Finish.STOP


def test_an_environment_that_fails_is_named() -> None:
    def failing(prompt: Prompt, *, seed: int) -> Any:
        def answer(sample: Sample, text: str) -> Any:
            if text == "7":
                return "wrong"
            raise KeyError("tool")

        return answer

    with refuses(RuntimeError, "p/0", "wrong"):
        played(Talker("7"), failing)
    with refuses(RuntimeError, "p/0", "KeyError", "tool", 8):
        played(Talker("8"), failing)
    with refuses(RuntimeError, "p", "ZeroDivisionError"):
        played(Talker("8"), lambda prompt, *, seed: 1 / 0)


class Wordy(Exception):
    def __str__(self) -> str:
        return "no tool\n" + "x" * 10_000_000


def test_what_a_function_raises_or_returns_is_cut_in_the_sentence() -> None:
    """It would stand in the console, the log of the driver and every report."""

    def raises(*_: Any, **__: Any) -> Any:
        raise Wordy

    long = "y" * 10_000_000
    for make, fact in (
        (raises, "Wordy"),
        (lambda prompt, *, seed: raises, "Wordy"),
        (lambda prompt, *, seed: lambda sample, reply: long, "p/0"),
    ):
        with refuses(RuntimeError, fact) as caught:
            played(Talker("7"), make)
        assert len(str(caught.value)) < 1000 and "\n" not in str(caught.value)
    with refuses(RuntimeError, "p", "Wordy") as caught:
        generated(raises)
    assert len(str(caught.value)) < 1000 and "\n" not in str(caught.value)


async def _sleeps(sample: Sample, reply: str) -> Observation:
    await asyncio.sleep(3600)
    return Observation(ends=True)


def _blocks(*_: Any, **__: Any) -> Any:
    threading.Event().wait(3600)


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda prompt, *, seed: _sleeps, ("p/0", "TimeoutError", 0.3)),
        (lambda prompt, *, seed: _blocks, ("p/0", "TimeoutError", 0.3)),
        (_blocks, ("p", "TimeoutError", 0.3)),
    ],
    ids=["a coroutine", "a function that blocks", "one that does not begin"],
)
def test_an_environment_that_never_answers_ends_the_episode_with_a_sentence(make: Any, facts: Facts) -> None:
    """Though it holds its thread for an hour."""
    with refuses(RuntimeError, "rollout.call_timeout_s", *facts):
        played(Talker("7", "24"), make, limit=0.3)


@pytest.mark.parametrize("count", [1, 3])
def test_functions_are_called_in_so_many_threads_and_beside_the_event_loop(count: int) -> None:
    """As many episodes as there are samples; by default none sees another in the middle of its call."""
    inside, most, threads, lock, together = 0, 0, set(), threading.Lock(), threading.Barrier(count, timeout=20)

    def make(prompt: Prompt, *, seed: int) -> Any:
        def answer(sample: Sample, reply: str) -> Observation:
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)
            threads.add(threading.current_thread() is threading.main_thread())
            together.wait()
            with lock:
                inside -= 1
            return Observation(ends=True)

        return answer

    assert len(played(Talker("7", "24"), make, n=6, limits={"threads": count})) == 6
    assert most == count and threads == {False}


def test_a_function_s_own_time_out_is_not_the_limit_s() -> None:
    def make(prompt: Prompt, *, seed: int) -> Any:
        raise TimeoutError("the game's server is down")

    with refuses(RuntimeError, "TimeoutError", "the game's server is down"):
        played(Talker("7", "24"), make)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"text": "a", "ends": True},
        {"text": "a", "token_ids": (1,)},
        {"text": "a", "messages": ({"role": "user", "content": "b"},)},
    ],
)
def test_an_observation_says_one_thing(wrong: dict[str, Any]) -> None:
    with refuses(ValueError, "token_ids"):
        Observation(**wrong)


# ---- generate functions


def generated(function: Any, *, max_tokens: int = 60, limit: float = 60) -> SampleGroup:
    engine = CustomGenerate(ResumingEngine(Talker("7", "24", aborts=1)), function, max_tokens=max_tokens, call_s=limit)
    (group,) = asyncio.run(engine.generate([PROMPT], n=2, params=PARAMS))
    return group


async def _twice(engine: RolloutEngine, prompt: Prompt, *, n: int, params: SamplingParams) -> Sequence[Sample]:
    (group,) = await engine.generate([prompt], n=n, params=params)
    return [await engine.continue_sample(s, (60,), params=params) for s in reversed(group.samples)]


def test_a_generate_function_makes_the_samples() -> None:
    """In the order of their indices; what it asked for was whole, though each turn was aborted."""
    group = generated(_twice)
    assert [s.name for s in group.samples] == ["p/0", "p/1"]
    assert [transcript(s) for s in group.samples] == ["7<24", "7<24"]


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda s: s[:1], ("['p/1']", 0, 1)),
        (lambda s: [replace(s[0], token_ids=s[0].token_ids + 1), s[1]], ("p/1",)),
        (lambda s: [replace(s[0], finish=Finish.ABORT), s[1]], ("p/1",)),
        (lambda s: [replace(s[0], versions=()), s[1]], ("p/1", 5)),
        (lambda s: [replace(s[0], reward=float("nan")), s[1]], ("p/1",)),
        (lambda s: None, ("p", "None", 2)),
        (lambda s: [s[0], "7"], ("rollout.generate", "p", 2)),
        (lambda s: 1 / 0, ("rollout.generate", "p", "ZeroDivisionError")),
    ],
)
def test_samples_that_cannot_be_trained_on_are_named(change: Callable[[Any], Any], facts: Facts) -> None:
    async def changed(engine: RolloutEngine, prompt: Prompt, *, n: int, params: SamplingParams) -> Sequence[Sample]:
        return change(await _twice(engine, prompt, n=n, params=params))  # type: ignore[no-any-return]

    with refuses(RuntimeError, *facts):
        generated(changed)


def test_samples_that_are_too_long_are_named() -> None:
    with refuses(RuntimeError, "p/1", 6, 5, "rollout.max_episode_tokens"):
        generated(_twice, max_tokens=5)


def test_a_generate_function_that_never_ends_is_given_up() -> None:
    async def never(engine: RolloutEngine, prompt: Prompt, *, n: int, params: SamplingParams) -> Sequence[Sample]:
        await asyncio.Event().wait()
        return ()

    with refuses(RuntimeError, "p", "TimeoutError", 0.2):
        generated(never, limit=0.2)

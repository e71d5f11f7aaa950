"""How an episode ends: rewards of its turns, spans, time limits, lost environments, and environments that are closed.

Not covered: what the tokens of an episode are (test_environment.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from miles_like.types import ENVIRONMENT, POLICY, EnvironmentLost, Observation, Prompt, Sample, Span
from rollout.chat.positions import last_turn
from rollout.episodes.environment import EpisodeLimits, Episodes
from rollout.episodes.greedy import GreedyFirst
from rollout.episodes.resuming import ResumingEngine
from tests.support.refusals import refuses
from tests.support.talker import PARAMS, PROMPT, Talker, played, played_group, text_of

FIRST = len(PROMPT.token_ids)


def answering(*answers: Observation) -> Any:
    """A MakeEnvironment whose environments give these answers."""

    def make(prompt: Prompt, *, seed: int) -> Any:
        left = iter(answers)
        return lambda sample, turn: next(left)

    return make


def spans(*made: tuple[str, int, int, float | None, float]) -> tuple[Span, ...]:
    return tuple(
        Span(who=who, start=FIRST + start, end=FIRST + end, reward=reward, seconds=seconds)
        for who, start, end, reward, seconds in made
    )


def test_spans_have_who_wrote_what_the_rewards_and_the_seconds() -> None:
    """ "7" and its end are two tokens, "<a>" three. Every look at this clock is a second after the one before."""
    clock = itertools.count().__next__
    make = answering(Observation(text="<a>", reward=0.25), Observation(text="<b>"), Observation(ends=True, reward=-0.5))
    (sample,) = played(Talker("7", "8+9", "24"), make, episodes={"clock": clock})
    assert sample.spans == spans(
        (POLICY, 0, 2, 0.25, 1),
        (ENVIRONMENT, 2, 5, None, 1),
        (POLICY, 5, 9, None, 1),
        (ENVIRONMENT, 9, 12, None, 1),
        (POLICY, 12, 15, -0.5, 1),
        (ENVIRONMENT, 15, 15, None, 1),
    )
    assert sample.reward == -0.25
    own = [i for s in sample.spans if s.who == POLICY for i in range(s.start, s.end)]
    assert own == sample.loss_mask.nonzero()[:, 0].tolist()


def test_an_episode_that_is_cut_keeps_the_rewards_of_its_turns() -> None:
    """At the limit of turns the last one is still answered; a turn that is cut is not."""
    make = answering(*[Observation(text="<a>", reward=0.25)] * 3)
    (sample,) = played(Talker("7", "8+9"), make, turns=2)
    assert sample.reward == 0.5 and sample.spans[-1].start == sample.spans[-1].end == sample.length
    (sample,) = played(Talker("7", "8+9+10"), make, turns=2)
    assert sample.reward == 0.25 and (sample.spans[-1].who, sample.spans[-1].status) == (POLICY, "length")
    (sample,) = played(Talker("7"), answering(Observation(ends=True)))
    assert sample.reward is None and sample.spans[0].reward is None


def test_messages_become_tokens_by_the_chat_format_alone() -> None:
    make = answering(Observation(messages=({"role": "tool", "content": "56"},)), Observation(ends=True))
    with refuses(ValueError, "p/0", 1, "token_ids"):
        played(Talker("7", "24"), make)

    class Chat:
        def render(self, sample: Sample, messages: Any) -> tuple[list[int], list[Span]]:
            text = "".join(m["content"] for m in messages)
            return list(f"<{text}>".encode()), [Span(who=ENVIRONMENT, start=1, end=3, what="tool_result", name="add")]

        def parse(self, sample: Sample) -> list[Span]:
            turn = sample.token_ids[last_turn(sample) :]
            return [Span(who=POLICY, start=0, end=len(turn) - 1, what="tool_call", name="add", status="ok")]

    (sample,) = played(Talker("7", "24"), make, episodes={"chat": Chat()})
    assert text_of(sample.token_ids[FIRST:].tolist()) == "7<56>24"
    found = [(s.what, text_of(sample.token_ids[s.start : s.end].tolist())) for s in sample.spans if s.end > s.start]
    assert found == [
        ("turn", "7"),
        ("tool_call", "7"),
        ("turn", "<56>"),
        ("tool_result", "56"),
        ("turn", "24"),
        ("tool_call", "24"),
    ]


# ---- time limits and lost environments


async def _sleeps(sample: Sample, turn: str) -> Observation:
    await asyncio.sleep(3600)
    return Observation(ends=True)


def _second_sleeps(answer: Any) -> Any:
    """A MakeEnvironment: the second environment answers by `answer`, the others end their episodes."""
    made = itertools.count()

    def make(prompt: Prompt, *, seed: int) -> Any:
        return answer if next(made) == 1 else lambda sample, turn: Observation(ends=True, reward=1.0)

    return make


@pytest.mark.parametrize(
    ("limits", "answer", "reason"),
    [
        ({"environment_s": 0.2}, _sleeps, "environment timeout"),
        ({"environment_s": 0.2}, lambda sample, turn: threading.Event().wait(3600), "environment timeout"),
        ({"episode_s": 0.2}, _sleeps, "episode timeout"),
    ],
    ids=["a coroutine", "a function that blocks", "the whole episode"],
)
def test_an_episode_that_takes_too_long_is_discarded_with_its_reason(limits: Any, answer: Any, reason: str) -> None:
    group = played_group(Talker("7"), _second_sleeps(answer), n=3, limits=limits)
    assert [s.index for s in group.samples] == [0, 2] and group.discarded == {reason: 1}


def test_an_environment_that_is_lost_costs_its_episode_alone() -> None:
    """Also where it cannot be made; the reason is one short line."""

    def lost(*_: Any, **__: Any) -> Any:
        raise EnvironmentLost("container\n" + "x" * 1000)

    group = played_group(Talker("7"), _second_sleeps(lost), n=3)
    ((reason, n),) = group.discarded.items()
    assert [s.index for s in group.samples] == [0, 2] and n == 1
    assert reason.startswith("container xx") and len(reason) <= 100
    group = played_group(Talker("7"), lost, n=2)
    assert not group.samples and sum(group.discarded.values()) == 2


def test_greedy_answers_beside_episodes_keep_what_is_discarded() -> None:
    def make(prompt: Prompt, *, seed: int) -> Any:
        raise EnvironmentLost("no room")

    limits = EpisodeLimits(max_turns=2, max_tokens=60)
    episodes = Episodes(
        ResumingEngine(Talker("7", "7")), make, limits, encode=lambda t: list(t.encode()), decode=text_of
    )
    (group,) = asyncio.run(GreedyFirst(episodes).generate([PROMPT], n=3, params=PARAMS))
    assert not group.samples and group.discarded == {"no room": 3}


# ---- close


class Closed:
    """A MakeEnvironment; counts how often its environments are closed. answer: of each of them."""

    def __init__(self, answer: Any, *, fails: bool = False) -> None:
        self.answer, self.fails, self.made, self.closed = answer, fails, 0, 0

    def __call__(self, prompt: Prompt, *, seed: int) -> Any:
        self.made += 1
        outer = self

        class One:
            def __call__(self, sample: Sample, turn: str) -> Any:
                return outer.answer(sample, turn)

            async def close(self) -> None:
                await asyncio.sleep(0)
                outer.closed += 1
                if outer.fails:
                    raise OSError("no such container")

        return One()


def _raises(error: Exception) -> Any:
    def answer(sample: Sample, turn: str) -> Any:
        raise error

    return answer


@pytest.mark.parametrize(
    ("answer", "how", "raises"),
    [
        (lambda sample, turn: Observation(ends=True), {}, None),
        (lambda sample, turn: Observation(text="<a>"), {"turns": 2}, None),
        (lambda sample, turn: Observation(text="<a>"), {"max_new_tokens": 2}, None),
        (_raises(EnvironmentLost("gone")), {}, None),
        (_sleeps, {"limits": {"environment_s": 0.1}}, None),
        (_sleeps, {"limits": {"episode_s": 0.1}}, None),
        (_raises(KeyError("tool")), {}, RuntimeError),
    ],
    ids=["end", "turns", "cut", "lost", "environment timeout", "episode timeout", "error"],
)
def test_an_environment_is_closed_once_however_its_episode_ends(answer: Any, how: Any, raises: Any) -> None:
    make = Closed(answer)
    try:
        played_group(Talker("7", "8+9", "24"), make, n=2, **how)
    except RuntimeError:
        assert raises is RuntimeError
    assert make.made in (1, 2) and make.closed == make.made


def test_an_environment_is_closed_where_the_run_is_cancelled() -> None:
    """Twice, the second time while it is being closed."""
    make = Closed(_sleeps)

    async def run() -> None:
        limits = EpisodeLimits(max_turns=2, max_tokens=60)
        engine = ResumingEngine(Talker("7"))
        episodes = Episodes(engine, make, limits, encode=lambda t: list(t.encode()), decode=text_of)
        task = asyncio.create_task(episodes.generate([PROMPT], n=3, params=replace(PARAMS)))
        while make.made < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(run())
    assert make.closed == 3


def test_a_close_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        group = played_group(Talker("7"), Closed(lambda sample, turn: Observation(ends=True), fails=True))
    assert len(group.samples) == 1
    assert "p/0" in caplog.text and "no such container" in caplog.text


def test_a_whole_episode_stays_where_its_environment_closes_late() -> None:
    class Slow:
        def __init__(self, prompt: Prompt, *, seed: int) -> None:
            pass

        def __call__(self, sample: Sample, turn: str) -> Observation:
            return Observation(ends=True, reward=1.0)

        async def close(self) -> None:
            await asyncio.sleep(0.6)

    group = played_group(Talker("7"), Slow, limits={"episode_s": 0.3})
    assert [s.reward for s in group.samples] == [1.0] and not group.discarded


def test_an_environment_that_is_made_too_late_is_closed_by_its_thread() -> None:
    closed = threading.Event()

    class Late:
        def __init__(self, prompt: Prompt, *, seed: int) -> None:
            time.sleep(0.3)

        def __call__(self, sample: Sample, turn: str) -> Observation:
            return Observation(ends=True)

        async def close(self) -> None:
            closed.set()

    group = played_group(Talker("7"), Late, limits={"environment_s": 0.1})
    assert group.discarded == {"environment timeout": 1} and closed.wait(5)

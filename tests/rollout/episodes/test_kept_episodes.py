"""An episode that was in flight when its run was saved is, after a resume, the episode that was never interrupted.

Wherever it was cut: before an answer, within a turn, after it. A new environment gets the turns again. Not covered:
the checkpoint and the process that is killed (tests/laws/test_kills.py).
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from miles_like.report.reward_calls import RewardTally
from miles_like.types import Finish, Observation, Prompt, Sample, SampleGroup, SamplingParams, VersionSpan
from rollout.episodes.environment import EpisodeLimits, Episodes
from rollout.episodes.replay import cut
from rollout.episodes.resuming import ResumingEngine
from tests.support.made_samples import sample as made_sample
from tests.support.talker import PARAMS, PROMPT, Talker, text_of, transcript

LINES = ("7", "8+9", "10", "24")
FIRST = len(PROMPT.token_ids)


class Game:
    """Answers by the turns so far and by its seed; rewards some turns. draw: of its random words."""

    turns: list[str]

    def __init__(self, prompt: Prompt, *, seed: int, draw: str = "abc", last: str = "24") -> None:
        self.turns, self.random, self.draw, self.last = [], random.Random(seed), draw, last

    def __call__(self, sample: Sample, turn: str) -> Observation:
        assert text_of(sample.token_ids[FIRST:].tolist()).endswith(turn) and sample.finish is Finish.STOP
        self.turns.append(turn)
        reward = 0.25 if len(self.turns) % 2 else None
        if turn == self.last:
            return Observation(ends=True, reward=reward)
        return Observation(text=f"<{''.join(self.turns)}{self.random.choice(self.draw)}>", reward=reward)


class Noting(Talker):
    """Keeps each state in which a checkpoint could find the episode: the sample that was last returned, and what the
    policy says next."""

    def __init__(self, *lines: str, aborts: int = 0) -> None:
        super().__init__(*lines, aborts=aborts)
        self.states: list[tuple[Sample, Any]] = []

    def _turn(self, sample: Sample, fed: Sequence[int], params: SamplingParams) -> Sample:
        turn = super()._turn(sample, fed, params)
        self.states.append((turn, copy.deepcopy(self.left)))
        return turn


class Restored(Talker):
    """Its sample is `sample`, as `PartialRollouts` gives it after a resume."""

    def __init__(self, sample: Sample, left: Any) -> None:
        super().__init__(*LINES)
        self.sample, self.left = sample, left

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> list[SampleGroup]:
        return [SampleGroup(prompt=prompts[0], samples=(self.sample,))]


def played(engine: Talker, make: Any = Game, log: RewardTally | None = None, turns: int = 5) -> Sample:
    limits = EpisodeLimits(max_turns=turns, max_tokens=80)
    episodes = Episodes(
        ResumingEngine(engine),
        make,
        limits,
        encode=lambda text: list(text.encode()),
        decode=text_of,
        clock=lambda: 0.0,
        log=log,
    )
    (group,) = asyncio.run(episodes.generate([PROMPT], n=1, params=replace(PARAMS, max_new_tokens=6)))
    return group.samples[0]


def same(a: Sample, b: Sample) -> None:
    for name in ("token_ids", "loss_mask", "logprobs"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    for name in ("spans", "reward", "finish", "text"):
        assert getattr(a, name) == getattr(b, name), name


@pytest.mark.parametrize("turns", [3, 5])
@pytest.mark.parametrize("aborts", [0, 1, 2])
def test_an_episode_goes_on_wherever_it_was_cut(aborts: int, turns: int) -> None:
    """Aborts cut a turn before its first token and after it; with 3 turns the limit ends it."""
    noting = Noting(*LINES, aborts=aborts)
    whole = played(noting, turns=turns)
    assert len(noting.states) >= turns - 1
    log = RewardTally()
    for state, left in noting.states:
        if not state.versions:
            continue  # nothing was sampled: such groups are not kept
        same(played(Restored(state, left), log=log, turns=turns), whole)
    assert log.replayed and not log.begun_anew
    assert log.metrics()["perf/episodes/replayed"] >= turns - 2


@pytest.mark.parametrize("other", [lambda text: "<!>", lambda text: "!" * len(text)], ids=["length", "tokens"])
def test_from_the_first_answer_that_is_another_the_episode_is_played_again(other: Any) -> None:
    """Of the tokens before it none changes; what follows is what the new environment answers to. The policy's lines
    are those after the turns that are kept."""
    noting = Noting(*LINES)
    played(noting)
    state, left = noting.states[2]  # its third turn has ended
    kept = text_of(state.token_ids[FIRST:].tolist())

    class Other(Game):
        def __init__(self, prompt: Prompt, *, seed: int) -> None:
            super().__init__(prompt, seed=seed)

        def __call__(self, sample: Sample, turn: str) -> Observation:
            answer = super().__call__(sample, turn)
            return replace(answer, text=other(answer.text)) if len(self.turns) == 2 else answer

    log, talker = RewardTally(), Restored(state, left)
    found = played(talker, Other, log)
    assert (log.replayed, log.begun_anew) == (0, 1)
    assert transcript(found).startswith(kept[: kept.index("8+9") + 3] + other("<78+9b>"))
    assert found.loss_mask.sum() == sum(s.end - s.start for s in found.spans if s.who == "policy")
    rewarded = log.metrics()
    assert rewarded["perf/episodes/begun_anew"] == 1.0


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: replace(answer, reward=0.5),
        lambda answer: replace(answer, text=answer.text + "!"),
        lambda answer: Observation(ends=True, reward=1.0),
    ],
    ids=["reward", "length", "end"],
)
def test_an_answer_repeats_only_with_its_reward_its_length_and_its_end(change: Any) -> None:
    """The turn after it had not begun: of its answer's tokens only the number is kept."""
    noting = Noting(*LINES, aborts=1)
    played(noting)
    state, left = next((s, left) for s, left in noting.states if s.spans and s.finish is Finish.ABORT)
    assert state.length < state.spans[-1].end

    def make(prompt: Prompt, *, seed: int) -> Any:
        game, first = Game(prompt, seed=seed), [True]

        def answer(sample: Sample, turn: str) -> Observation:
            found = game(sample, turn)
            return change(found) if first.pop() else found  # type: ignore[no-any-return]

        def once(sample: Sample, turn: str) -> Observation:
            return answer(sample, turn) if first else game(sample, turn)

        return once

    log = RewardTally()
    played(Restored(state, left), make, log)
    assert (log.replayed, log.begun_anew) == (0, 1)


def test_a_cut_sample_is_the_sample_as_it_was_then() -> None:
    """Its routes have their checksums, its versions end with its tokens."""
    whole = made_sample(response_len=6, routing=True)
    part = cut(whole, 5, (), lambda ids: str(ids))
    assert part.length == 5 and part.text == "[2, 3, 4]" and part.versions == ((0, 0, 3),)
    assert part.routing is not None and whole.routing is not None
    part.routing.check_tokens(part.token_ids, sample="p/0")
    assert part.routing.versions == ((0, 0, 4),)
    rest = whole.routing.map_rows(lambda x: x[4:])
    joined = part.routing.append(
        rest.with_checksums(whole.token_ids[4:-1], start=4, versions=(VersionSpan(0, 0, 3),)), 4
    )
    assert joined.layer_checksums is not None and whole.routing.layer_checksums is not None
    assert torch.equal(joined.layer_checksums, whole.routing.layer_checksums)
    assert joined.versions == whole.routing.versions

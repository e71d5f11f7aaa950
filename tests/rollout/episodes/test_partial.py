"""What is known of samples under way, and the gate in front of the servers. The law is test_suspended_rollouts.py."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest

from miles_like.types import Finish, Observation, Prompt, Sample, SampleGroup, SamplingParams
from rollout.episodes.environment import EpisodeLimits, Episodes
from rollout.episodes.partial import PartialRollouts
from rollout.episodes.resuming import ResumingEngine
from rollout.sglang.samples import empty_sample
from tests.support.fakes import FakeEngine, make_prompt
from tests.support.refusals import Facts, refuses

PARAMS = SamplingParams(max_new_tokens=4, sampling_seed=3)
A, B = make_prompt("a/b"), make_prompt("b")


def _state(kept: PartialRollouts) -> dict[str, list[tuple[int, Finish]]]:
    return {k: [(s.response_len, s.finish) for s in g.samples] for k, g in kept.state().items()}


def test_it_knows_the_last_of_each_sample_until_its_group_is_over() -> None:
    """What has no token yet is not worth a checkpoint."""

    async def run() -> None:
        kept = PartialRollouts(FakeEngine(aborts=2))
        groups = await kept.generate([A, B], n=2, params=PARAMS)
        assert _state(kept) == {}
        await kept.continue_sample(groups[0].samples[1], params=PARAMS)
        assert _state(kept) == {"3/a/b": [(0, Finish.ABORT), (1, Finish.ABORT)]}
        await kept.continue_sample(groups[0].samples[1], params=dataclasses.replace(PARAMS, max_new_tokens=3))
        assert _state(kept) == {"3/a/b": [(0, Finish.ABORT), (3, Finish.STOP)]}
        kept.forget(3, "a/b")
        await kept.continue_sample(groups[0].samples[0], params=PARAMS)
        assert _state(kept) == {}

    asyncio.run(run())


def test_what_was_restored_is_not_asked_for_again_and_is_saved_again() -> None:
    """Also when the next checkpoint comes before a request for it. The other prompts of the call go to a server;
    the same prompt under another seed is another rollout."""

    async def run() -> None:
        first = PartialRollouts(FakeEngine())
        await first.generate([A], n=2, params=PARAMS)
        engine = FakeEngine(version=7)
        kept = PartialRollouts(engine)
        kept.restore(first.state())
        assert _state(kept) == _state(first) == {"3/a/b": [(3, Finish.STOP)] * 2}
        groups = await kept.generate([B, A], n=2, params=PARAMS)
        assert [g.prompt.id for g in groups] == ["b", "a/b"] and engine.asked == ["b"]
        assert [g.oldest_version for g in groups] == [7, 0]
        await kept.generate([A], n=2, params=dataclasses.replace(PARAMS, sampling_seed=4))
        assert engine.asked == ["b", "a/b"] and set(kept.state()) == {"3/a/b", "3/b", "4/a/b"}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "n", "facts"),
    [
        (A, 3, ("a/b", 2, 3)),
        (make_prompt("a/b", tokens=(5, 6)), 2, ("a/b", 3, 2)),
    ],
)
def test_a_rollout_of_another_run_is_refused(prompt: Prompt, n: int, facts: Facts) -> None:
    async def run() -> None:
        first, kept = PartialRollouts(FakeEngine()), PartialRollouts(FakeEngine())
        await first.generate([A], n=2, params=PARAMS)
        kept.restore(first.state())
        with refuses(ValueError, *facts):
            await kept.generate([prompt], n=n, params=PARAMS)

    asyncio.run(run())


@pytest.mark.parametrize("name", ["3", "x/a/b", "3/a"])
def test_a_name_that_it_cannot_have_given_is_refused(name: str) -> None:
    group = SampleGroup(prompt=A, samples=(empty_sample(A, 0),))
    with refuses(ValueError, "a/b", name):
        PartialRollouts(FakeEngine()).restore({name: group})


class Late(FakeEngine):
    """The first `late` orders to abort overtake what they are to end."""

    def __init__(self, late: int) -> None:
        super().__init__(delay_s=60.0)
        self.late = late

    async def abort_all(self) -> None:
        self.late -= 1
        if self.late < 0:
            await super().abort_all()


def test_while_it_is_suspended_nothing_is_under_way_and_what_comes_waits() -> None:
    """Also a request that was still on its way when the servers received the abort."""

    async def run() -> None:
        engine = Late(late=2)
        kept = PartialRollouts(engine)
        first = asyncio.create_task(kept.generate([A], n=1, params=PARAMS))
        await asyncio.sleep(0)
        async with kept.suspended():
            assert engine.under_way == 0 and engine.late == -1
            assert (await first)[0].samples[0].finish is Finish.ABORT
            engine.delay_s = 0.0
            second = asyncio.create_task(kept.generate([B], n=1, params=PARAMS))
            for _ in range(10):
                await asyncio.sleep(0)
            assert engine.asked == ["a/b"]
        assert (await second)[0].samples[0].finish is Finish.STOP and engine.asked == ["a/b", "b"]

    asyncio.run(run())


def test_servers_that_cannot_be_told_to_abort_leave_the_gate_open() -> None:
    """The run then ends with what was raised, or goes on; it does not hang."""

    class Gone(FakeEngine):
        async def abort_all(self) -> None:
            raise RuntimeError("server gone")

    async def run() -> None:
        engine = Gone(delay_s=0.2)
        kept = PartialRollouts(engine)
        call = asyncio.create_task(kept.generate([A], n=1, params=PARAMS))
        await asyncio.sleep(0)
        with refuses(RuntimeError, "server gone"):
            async with kept.suspended():
                raise AssertionError("not suspended")
        await call
        await kept.generate([B], n=1, params=PARAMS)

    asyncio.run(run())


def test_only_what_a_suspension_aborted_is_asked_for_again() -> None:
    """A server that aborts every request must remain visible to the code that counts its aborts."""

    async def run() -> None:
        engine = FakeEngine(aborts=9)
        kept = PartialRollouts(engine)
        (group,) = await kept.generate([A], n=1, params=PARAMS)
        sample: Sample = group.samples[0]
        for length in (1, 2, 3, 3, 3):
            sample = await kept.continue_sample(sample, params=PARAMS)
            assert (sample.response_len, sample.finish) == (length, Finish.ABORT)
        assert len(engine.continued) == 5
        engine.delay_s = 60.0
        call = asyncio.create_task(kept.continue_sample(sample, params=PARAMS))
        await asyncio.sleep(0)
        async with kept.suspended():
            engine.delay_s = 0.0
            assert not call.done()
        assert (await call).finish is Finish.ABORT and len(engine.continued) == 7

    asyncio.run(run())


class Turns(FakeEngine):
    """A turn is the token 9."""

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        self.continued.append((sample.name, len(sample.token_ids), params))
        if await self._take_time():
            return dataclasses.replace(sample, finish=Finish.ABORT)
        whole = Prompt(id=sample.prompt_id, token_ids=(*sample.token_ids.tolist(), *environment), answer="")
        return dataclasses.replace(empty_sample(whole, sample.index), finish=Finish.STOP)


def test_an_episode_is_suspended_in_its_turn_and_not_kept() -> None:
    """The state of its environment is not saved: after a resume it starts again. If it were kept, its first turn would
    be taken for the whole sample, or its third for the first."""

    async def run() -> None:
        engine, answers = Turns(), []
        kept = PartialRollouts(engine, keep_groups=False)

        def make(prompt: Prompt, *, seed: int) -> object:
            def answer(sample: Sample, reply: str) -> Observation:
                answers.append(len(sample.token_ids))
                engine.delay_s = 60.0 if len(answers) == 1 else 0.0  # the second turn is under way for long
                return Observation(ends=True, reward=1.0) if len(answers) == 3 else Observation(token_ids=(8,))

            return answer

        limits = EpisodeLimits(max_turns=5, max_tokens=50)
        episodes = Episodes(ResumingEngine(kept, 1), make, limits, encode=list, decode=lambda ids: "")
        call = asyncio.create_task(episodes.generate([A], n=1, params=PARAMS))
        while not engine.continued:
            await asyncio.sleep(0)
        async with kept.suspended():
            engine.delay_s = 0.0
            assert kept.state() == {} and answers == [6]
        (group,) = await call
        assert group.samples[0].reward == 1.0 and answers == [6, 7, 8] and kept.state() == {}
        assert [tokens for _, tokens, _ in engine.continued] == [6, 6, 7]

    asyncio.run(run())

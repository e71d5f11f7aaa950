"""Every step trains as many groups as it says: what is left out is replaced, or the run ends.

Not covered: what a filter or a reward decides (their own tests); which group is admitted when
(laws/test_staleness_bound.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from miles_like.checkpoint.ledger import Ledger
from miles_like.loop.buffer import DataBuffer, Taken
from miles_like.loop.producer import OVERSAMPLED, UNSCORED, Producer
from miles_like.loop.rollout_stats import RolloutStats, total
from miles_like.types import Prompt, SampleGroup
from tests.support.made_samples import group, sample
from tests.support.refusals import refuses

Body = Callable[["Source"], Awaitable[Any]]


class Source:
    """Prompt i is answered with two samples of reward `rewards(i)`, when `ready(i)` returns."""

    def __init__(self, rewards: Any, *, k: int = 0, prompts: int = 10**6, masked: bool = False, **how: Any) -> None:
        self.next, self.last, self.rewards = 0, prompts, rewards
        self.asked = list[tuple[int, list[str]]]()
        self.aborts = 0
        self.held = asyncio.Event()
        self.late: set[str] = set()
        self.ledger = Ledger(None)
        backfill = k > 0 and not how.get("lockstep")
        more = {"ledger": self.ledger, "backfill": backfill, "mask_old_tokens": masked}
        self.buffer = DataBuffer(max_staleness=k, samples=2, **more)
        self.producer = Producer(buffer=self.buffer, source=self, sampler=self, **how)

    def take(self, n: int) -> list[Prompt]:
        first, self.next = self.next, min(self.next + n, self.last)
        return [self.prompt(str(i)) for i in range(first, self.next)]

    def prompt(self, name: str) -> Prompt:
        return Prompt(id=name, token_ids=(1,), answer="")

    async def abort(self) -> None:
        self.aborts += 1

    async def groups(self, wave: int, prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[int, SampleGroup], None]:
        self.asked.append((wave, [p.id for p in prompts]))
        for i, p in enumerate(prompts):
            if p.id not in self.late:
                yield i, self.answered(p)
        for i, p in enumerate(prompts):
            if p.id in self.late:
                await self.held.wait()
                yield i, self.answered(p)

    def answered(self, prompt: Prompt) -> SampleGroup:
        rewards = self.rewards(int(prompt.id))
        version = self.producer.version
        kept = [sample(prompt.id, i, reward=r, version=version) for i, r in enumerate(rewards) if r is not None]
        lost = sum(r is None for r in rewards)
        made = group(kept) if kept else SampleGroup(prompt=prompt, samples=())
        return dataclasses.replace(made, prompt=prompt, discarded={"timed out": lost} if lost else {})

    async def step(self, version: int = 0) -> list[Taken]:
        taking = asyncio.create_task(self.buffer.take(self.producer.groups, version=version))
        await asyncio.wait({taking, self.running}, return_when=asyncio.FIRST_COMPLETED)
        if not taking.done():
            taking.cancel()
            self.running.result()
        return await taking

    def run(self, body: Body) -> Any:
        async def go() -> Any:
            self.running = asyncio.create_task(self.producer.run())
            try:
                return await body(self)
            finally:
                self.running.cancel()
                await asyncio.wait({self.running})

        return asyncio.run(asyncio.wait_for(go(), 10))


async def one_step(source: Source) -> tuple[list[str], dict[str, float]]:
    taken = await source.step()
    source.ledger.check([*source.buffer.group_ids, *(t.group_id for t in taken)])
    return [t.group.prompt.id for t in taken], total(t.stats for t in taken).metrics()


@pytest.mark.parametrize("k", [0, 2])
def test_groups_that_are_complete_are_counted_before_their_round_is(k: int) -> None:
    """An hour of sampling would otherwise look like nothing. With k = 0 a round is decided as a whole."""
    source = Source(lambda i: [0.0, 1.0], groups=4, k=k, steps=1)
    source.late = {"2"}

    async def body(s: Source) -> list[int]:
        await asyncio.sleep(0.01)
        before = s.producer.complete
        s.held.set()
        await asyncio.sleep(0.01)
        return [before, s.producer.complete]

    assert source.run(body) == [3, 4]


def equal(group: SampleGroup) -> str | None:
    return "equal rewards" if len(set(group.rewards)) < 2 else None


def test_what_a_filter_leaves_out_is_replaced_until_the_step_is_whole() -> None:
    """Of every three prompts one has equal rewards: groups come in the order admitted, none twice. The second wave
    samples as many prompts as fill the step at the share kept so far, and what is too much is not trained."""
    source = Source(lambda i: [0.0, float(i % 3 != 0)], groups=4, filter=equal, max_rounds=5)
    ids, metrics = source.run(one_step)
    assert ids == ["1", "2", "4", "5"]
    assert source.asked == [(0, ["0", "1", "2", "3"]), (1, ["4", "5", "6", "7"])]
    assert source.buffer.dropped == {"equal rewards": 3, OVERSAMPLED: 1}
    assert metrics["rollout/rounds"] == 2 and metrics["rollout/filtered_frac"] == pytest.approx(3 / 8)
    assert metrics["rollout/tokens"] == 16 * int(sample("p", 0).loss_mask.sum())


def test_one_group_in_eight_is_enough_for_ten_rounds() -> None:
    """A round has several prompts, also when a single group is missing."""
    source = Source(lambda i: [0.0, float(i % 8 == 7)], groups=64, filter=equal, max_rounds=10)
    ids, metrics = source.run(one_step)
    assert ids == [str(8 * i + 7) for i in range(64)] and metrics["rollout/rounds"] == 8


def test_a_group_without_a_scored_sample_is_replaced_and_a_group_with_one_is_kept() -> None:
    """Its reward is not set to 0, and the ledger has the reason for each of its discarded samples."""
    source = Source(lambda i: [None, None] if i == 0 else [1.0, None], groups=2, max_rounds=2)
    ids, metrics = source.run(one_step)
    assert ids == ["1", "2"] and source.buffer.dropped == {f"{UNSCORED}: timed out": 1, OVERSAMPLED: 1}
    assert metrics["rollout/discarded_frac"] == pytest.approx(5 / 8)
    assert source.ledger.metrics()["ledger/discarded"] == 4


def test_a_step_that_stays_too_small_ends_the_run_with_the_numbers() -> None:
    source = Source(lambda i: [1.0, 1.0], groups=3, filter=equal, max_rounds=2)
    facts = (0, 0, 3, 6, 6, 6, "rollout.max_rounds", 2)
    with refuses(RuntimeError, *facts):
        source.run(one_step)
    assert source.next == 6


def test_where_the_prompts_end_it_is_not_for_want_of_rounds() -> None:
    """The message for too few rounds would suggest another remedy."""
    source = Source(lambda i: [1.0, 1.0], groups=3, filter=equal, prompts=5, over_sampling=1.0)

    async def body(source: Source) -> None:
        await source.running
        assert source.producer.ended and source.buffer.dropped == {"equal rewards": 5}

    source.run(body)


def test_the_rest_is_aborted_and_discarded_when_a_step_is_full() -> None:
    """Half as many again are sampled; those that are late are not waited for."""
    source = Source(lambda i: [0.0, 1.0], groups=4, over_sampling=0.5)
    source.late = {"0", "3"}
    ids, _ = source.run(one_step)
    assert source.asked == [(0, ["0", "1", "2", "3", "4", "5"])]
    assert ids == ["1", "2", "4", "5"] and source.aborts == 1
    assert source.buffer.dropped == {OVERSAMPLED: 2} and not source.buffer.group_ids


def test_the_time_of_a_step_that_was_full_early_is_its_own() -> None:
    """Not that of the step after it."""
    source = Source(lambda i: [0.0, 1.0], groups=2, over_sampling=0.5)
    source.late = {"1", "2"}

    async def body(source: Source) -> float:
        asyncio.get_running_loop().call_later(0.05, source.held.set)
        return total(t.stats for t in await source.step()).seconds

    assert source.run(body) >= 0.04


def test_in_lockstep_the_first_admitted_are_kept_whoever_is_late() -> None:
    source = Source(lambda i: [0.0, 1.0], groups=4, over_sampling=0.5, lockstep=True)
    source.late = {"0", "3"}
    source.held.set()
    ids, _ = source.run(one_step)
    assert ids == ["0", "1", "2", "3"] and not source.aborts and source.buffer.dropped == {OVERSAMPLED: 2}


def test_a_source_that_ends_ends_the_producer_and_not_in_the_middle_of_a_step() -> None:
    source = Source(lambda i: [0.0, 1.0], groups=4, prompts=6)

    async def body(source: Source) -> None:
        assert len(await source.step()) == 4 and not source.producer.ended
        source.producer.published(1)
        await source.running
        assert source.producer.ended and len(source.buffer) == 2

    source.run(body)


@pytest.mark.parametrize("how", [{}, {"k": 2}, {"k": 2, "lockstep": True}])
def test_nothing_is_sampled_that_no_step_would_train(how: dict[str, Any]) -> None:
    """Not even what a run that goes on would have sampled ahead; of what a filter leaves out there are others."""
    source = Source(lambda i: [0.0, float(i % 3 != 0)], groups=2, steps=3, filter=equal, max_rounds=9, **how)

    async def body(source: Source) -> None:
        for version in range(3):
            await source.step(version)
            await asyncio.sleep(0.01)
            source.producer.published(version + 1)
        await asyncio.sleep(0.01)

    source.run(body)
    assert not source.buffer.group_ids and source.buffer.dropped.keys() <= {"equal rewards", OVERSAMPLED}
    if how.get("k") and "lockstep" not in how:
        assert OVERSAMPLED not in source.buffer.dropped and source.next == 9


def test_what_is_left_out_for_its_age_is_replaced_though_nothing_is_in_flight() -> None:
    """The second step finds as many groups as it needs, all of them too old; no group in flight will make room."""
    source = Source(lambda i: [0.0, 1.0], groups=4, steps=2, over_sampling=1.0, masked=True)

    async def body(source: Source) -> list[str]:
        await source.step(0)
        source.producer.published(1)
        return [t.group.prompt.id for t in await source.step(1)]

    assert source.run(body) == ["8", "9", "10", "11"] and source.buffer.dropped == {"stale": 4}


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_producer_goes_on_where_it_was(lockstep: bool) -> None:
    """What was in flight is sampled again, in waves of the same numbers: its seeds are made of them."""
    how = {"groups": 2, "k": 1, "filter": equal, "max_rounds": 9, "lockstep": lockstep}
    first = Source(lambda i: [0.0, float(i % 3 != 0)], **how)
    first.late = set() if lockstep else {"2", "4"}

    async def begun(source: Source) -> Any:
        taken = await source.step()
        if lockstep:
            await source.producer.drain()
        else:
            await asyncio.sleep(0.01)
        for t in taken:
            source.ledger.train(1, t.group_id, t.group)
        source.ledger.flush(1)
        return json.loads(json.dumps([source.buffer.state()[0], source.producer.state(), source.ledger.state()]))

    buffer, producer, ledger = first.run(begun)
    second = Source(first.rewards, **how)
    second.next = first.next
    second.ledger.restore(ledger)
    second.buffer.restore(buffer, first.buffer.state()[1], second.prompt)
    second.producer.restore(producer, version=1, find=second.prompt)
    seen: list[Taken] = []

    async def goes_on(source: Source) -> None:
        for version in (1, 2, 3):
            taken = await source.step(version)
            seen.extend(taken)
            for t in taken:
                source.ledger.train(version + 1, t.group_id, t.group)
            if lockstep:
                await source.producer.drain()
            source.ledger.check(source.buffer.group_ids)
            source.producer.published(version + 1)

    second.run(goes_on)
    assert len({t.group_id for t in seen}) == 6
    in_flight = [[str(t) for t in w["tickets"]] for w in producer["waves"]]
    assert lockstep != bool(in_flight)
    assert second.asked[: len(in_flight)] == [
        (w["number"], p) for w, p in zip(producer["waves"], in_flight, strict=True)
    ]
    assert second.asked[len(in_flight)][0] == producer["number"]


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_prompt_that_comes_again_is_of_another_wave(lockstep: bool) -> None:
    """Three prompts, four groups a step, which two waves fill: in one the seeds of both its groups would be the same,
    and so would be their samples. A producer that goes on in between has what it held back."""

    class Few(Source):
        def take(self, n: int) -> list[Prompt]:
            self.next += n
            return [self.prompt(str(i % 3)) for i in range(self.next - n, self.next)]

    async def steps(source: Source) -> list[str]:
        ids = []
        for version in range(3):
            taken = await source.step(version)
            ids += [t.group.prompt.id for t in taken]
            if lockstep:
                await source.producer.drain()
            source.producer.published(version + 1)
        return ids

    few = Few(lambda i: [0.0, 1.0], groups=4, k=1, lockstep=lockstep)
    assert few.run(steps) == [str(i % 3) for i in range(12)]
    assert all(len(ids) == len(set(ids)) for _, ids in few.asked) and [w for w, _ in few.asked] == list(
        range(len(few.asked))
    )
    assert [i for _, ids in few.asked for i in ids][:12] == [str(i % 3) for i in range(12)]
    cut = Few(lambda i: [0.0, 1.0], groups=4, lockstep=lockstep)
    (wave,) = cut.producer._admitted()
    state = json.loads(json.dumps(cut.producer.state()))
    assert list(wave.group_ids.values()) == [cut.prompt(i) for i in "012"] and state["held"] == ["0"]
    later = Few(lambda i: [0.0, 1.0], groups=4, lockstep=lockstep)
    later.next = cut.next
    later.producer.restore(state | {"waves": []}, version=0, find=later.prompt)
    (wave,) = later.producer._admitted()
    assert [p.id for p in wave.group_ids.values()] == ["0", "1", "2"]


def test_a_tally_is_saved_whole() -> None:
    stats = RolloutStats(seconds=1.5, rounds=2)
    stats.count(group([sample("p", 0, reward=1.0)]), "equal")
    saved = RolloutStats.restored(json.loads(json.dumps(stats.state())))
    assert dataclasses.replace(stats, seconds=0.0) == saved and saved.rewards == [("p", (1.0,))]

"""The simulated loop admits, passes over, discards and takes the groups that the real loop does, at the same times.

Producer and DataBuffer of miles_like/loop run in virtual time beside their simulated forms, on the same groups with the
same durations, refusals and training times. Not covered: requests and servers, which both sides replace by a wait.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.checkpoint.ledger import Ledger
from miles_like.config.sections.loop import BufferConfig
from miles_like.loop.buffer import DataBuffer
from miles_like.loop.producer import Producer
from miles_like.simulation.clock.virtual_time import now, run_virtual
from miles_like.simulation.loop.buffer import SimBuffer
from miles_like.simulation.loop.ledger import SimLedger
from miles_like.simulation.loop.producer import SimProducer
from miles_like.simulation.servers.samples import SimGroup, SimSample
from miles_like.types import Prompt, SampleGroup, VersionSpan
from tests.support.made_samples import group as made_group
from tests.support.made_samples import sample

STEPS = 7
EARLY, LATE = 2, 3  # tokens of a sample that are drawn when it begins, and when it ends


@dataclass(frozen=True, kw_only=True)
class Case:
    buffer: BufferConfig
    groups: int
    refused: float
    max_rounds: int
    tail: float
    seed: int

    @property
    def free(self) -> bool:
        return self.buffer.slack > 0 and not self.buffer.lockstep

    def duration(self, group_id: int) -> float:
        """Heavy-tailed, so that groups overtake each other."""
        return random.Random(f"{self.seed} {group_id}").paretovariate(self.tail)

    def refuses(self, group_id: int) -> bool:
        return random.Random(f"{self.seed} filter {group_id}").random() < self.refused

    def train_s(self, step: int) -> float:
        return random.Random(f"{self.seed} train {step}").uniform(0.1, 3)

    async def waits(self, group_id: int, version: Callable[[], int]) -> list[tuple[int, int]]:
        """The spans of a group that is sampled now."""
        first = version()
        await asyncio.sleep(self.duration(group_id))
        return [(first, EARLY), (version(), LATE)]


@dataclass
class Seen:
    """What one loop did: events in order, each with its time."""

    events: list[Any] = field(default_factory=list)

    def note(self, *event: Any) -> None:
        self.events.append((round(now(), 6), *event))


async def in_order(calls: Sequence[Awaitable[int]]) -> AsyncGenerator[int, None]:
    """Results as they become available."""
    tasks = [asyncio.ensure_future(c) for c in calls]
    waiting = set(tasks)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task in done:
                    yield task.result()
    finally:
        for task in tasks:
            task.cancel()


async def steps(case: Case, seen: Seen, producer: Any, take: Callable[[int], Awaitable[list[tuple[int, int]]]]) -> None:
    """The order of Controller.run; ends early where the producer gives up."""
    sampling = asyncio.create_task(producer.run())
    try:
        for step in range(STEPS):
            taking = asyncio.ensure_future(take(step))
            await asyncio.wait({taking, sampling}, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                taking.cancel()
                seen.note("ended", type(sampling.exception()).__name__)
                return
            seen.note("taken", step, taking.result())
            await asyncio.sleep(case.train_s(step))
            if producer.in_steps:
                draining = asyncio.create_task(producer.drain())
                await asyncio.wait({draining, sampling}, return_when=asyncio.FIRST_COMPLETED)
                if not draining.done():
                    draining.cancel()
                    seen.note("ended", type(sampling.exception()).__name__)
                    return
            await asyncio.sleep(0.05)
            producer.published(step + 1)
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)


class RealSampler:
    def __init__(self, case: Case, seen: Seen) -> None:
        self.case, self.seen, self.asked = case, seen, 0
        self.producer: Producer

    def take(self, n: int) -> list[Prompt]:
        first, self.asked = self.asked, self.asked + n
        return [Prompt(id=str(i), token_ids=(1,), answer="") for i in range(first, first + n)]

    async def groups(self, number: int, prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[int, SampleGroup], None]:
        self.seen.note("round", [int(p.id) for p in prompts])

        async def one(place: int) -> int:
            spans = await self.case.waits(int(prompts[place].id), lambda: self.producer.version)
            answer = replace(
                sample(prompts[place].id, 0, response_len=EARLY + LATE, reward=1.0),
                versions=(
                    VersionSpan(spans[0][0], 0, EARLY),
                    VersionSpan(spans[1][0], EARLY, EARLY + LATE),
                ),
            )
            made[place] = replace(made_group([answer]), prompt=prompts[place])
            return place

        made: dict[int, SampleGroup] = {}
        async for place in in_order([one(i) for i in range(len(prompts))]):
            yield place, made[place]

    async def abort(self) -> None:
        self.seen.note("abort")


def real(case: Case) -> Seen:
    async def run() -> Seen:
        seen = Seen()
        sampler, b = RealSampler(case, seen), case.buffer
        buffer = DataBuffer(
            max_staleness=b.max_staleness,
            ledger=Ledger(None),
            backfill=case.free,
            mask_old_tokens=b.old_tokens == "mask",
        )
        sampler.producer = producer = Producer(
            groups=case.groups,
            buffer=buffer,
            source=sampler,
            sampler=sampler,
            filter=lambda g: "refused" if case.refuses(int(g.prompt.id)) else None,
            lockstep=bool(b.lockstep),
            over_sampling=b.over_sampling,
            steps=STEPS,
            max_rounds=case.max_rounds,
        )

        async def take(step: int) -> list[tuple[int, int]]:
            taken = await buffer.take(case.groups, version=step)
            return [(t.group_id, t.group.oldest_version) for t in taken]

        await steps(case, seen, producer, take)
        reasons = {"refused": 0, "more than the step needs": 0, "stale": 0} | dict(buffer.dropped)
        seen.note("left", sorted(buffer.group_ids), reasons)
        return seen

    return run_virtual(run())


class SimulatedSampler:
    def __init__(self, case: Case, seen: Seen) -> None:
        self.case, self.seen = case, seen
        self.producer: SimProducer

    async def groups(self, groups: Sequence[SimGroup]) -> AsyncGenerator[int, None]:
        self.seen.note("round", [g.group_id for g in groups])

        async def one(place: int) -> int:
            group = groups[place]
            group.samples[0].spans = await self.case.waits(group.group_id, lambda: self.producer.version)
            group.samples[0].ended = now()
            return place

        async for place in in_order([one(i) for i in range(len(groups))]):
            yield place

    async def abort(self) -> None:
        self.seen.note("abort")


def simulated(case: Case) -> Seen:
    async def run() -> Seen:
        seen, b = Seen(), case.buffer
        sampler = SimulatedSampler(case, seen)
        buffer = SimBuffer(
            max_staleness=b.max_staleness,
            backfill=case.free,
            mask_old_tokens=b.old_tokens == "mask",
            ledger=SimLedger(),
        )
        sampler.producer = producer = SimProducer(
            groups=case.groups,
            buffer=buffer,
            sampler=sampler,
            make=lambda i: SimGroup(
                group_id=i,
                samples=[SimSample(prompt_tokens=1, length=EARLY + LATE)],
                needed=1,
                accepted=not case.refuses(i),
            ),
            lockstep=bool(b.lockstep),
            over_sampling=b.over_sampling,
            steps=STEPS,
            max_rounds=case.max_rounds,
        )

        async def take(step: int) -> list[tuple[int, int]]:
            taken = await buffer.take(case.groups, version=step)
            return [(g.group_id, g.oldest_version) for g in taken]

        await steps(case, seen, producer, take)
        reasons = {"by the filter": 0, "more than the step needs": 0, "stale": 0} | dict(buffer.ledger.reasons)
        reasons["refused"] = reasons.pop("by the filter")
        seen.note("left", sorted(buffer.entries), reasons)
        return seen

    return run_virtual(run())


def allowed(given: dict[str, Any]) -> BufferConfig | None:
    """None for keys that do not fit each other, which no run has."""
    try:
        config = BufferConfig.model_validate(given)
        config.check(deterministic=False)
    except ValueError:
        return None
    return config


BUFFERS = st.fixed_dictionaries(
    {
        "max_staleness": st.integers(0, 3),
        "over_sampling": st.sampled_from([None, None, 0.5, 1.0, 1.5, 2.5]),
        "lockstep": st.booleans(),
        "old_tokens": st.sampled_from(["drop", "drop", "mask"]),
    }
)


@settings(max_examples=100, deadline=None)
@given(
    buffer=BUFFERS.map(allowed).filter(lambda b: b is not None),
    groups=st.integers(1, 5),
    refused=st.sampled_from([0.0, 0.3, 0.6]),
    max_rounds=st.sampled_from([2, 6, 20]),
    tail=st.sampled_from([0.7, 1.5, 5.0]),
    seed=st.integers(0, 10**6),
)
def test_both_loops_do_the_same_at_the_same_times(
    buffer: BufferConfig, groups: int, refused: float, max_rounds: int, tail: float, seed: int
) -> None:
    case = Case(buffer=buffer, groups=groups, refused=refused, max_rounds=max_rounds, tail=tail, seed=seed)
    assert simulated(case).events == real(case).events


@pytest.mark.slow
def test_the_cases_reach_masks_aborts_back_fill_and_an_end() -> None:
    """Without these the comparison would hold for rules that are missing."""
    seen = set[str]()
    for seed in range(12):
        for given_, refused in (
            ({"max_staleness": 1}, 0.4),
            ({"over_sampling": 1.0}, 0.4),
            ({"over_sampling": 1.5, "max_staleness": 1, "old_tokens": "mask"}, 0.4),
            ({"max_staleness": 2, "lockstep": True}, 0.8),
        ):
            config = allowed({"lockstep": False} | given_)
            assert config is not None
            case = Case(buffer=config, groups=3, refused=refused, max_rounds=4, tail=0.7, seed=seed)
            events = simulated(case).events
            assert events == real(case).events
            seen |= {e[1] for e in events} | {reason for reason, n in events[-1][3].items() if n}
            taken = [i for e in events if e[1] == "taken" for i, _ in e[3]]
            seen |= {"overtaken"} if taken != sorted(taken) else set()
    assert seen >= {"abort", "ended", "taken", "stale", "refused", "more than the step needs", "overtaken"}

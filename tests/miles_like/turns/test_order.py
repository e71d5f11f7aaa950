"""Law: whatever enters the two sides, in whatever order and how many at once, each side has the memory alone, no server
gets an order that would end it, and samples in flight are none when a turn changes.

Why it must hold: both sides together do not fit on the devices, and a stock server dies of a wrong order. Random
schedules of concurrent users run on recorded stand-ins of both sides, which hold the rules: the servers' are those of
`Occupation`, itself held to a stock server's (tests/rollout/sglang/test_occupation.py). Not covered: what the sides do
in their turn.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from miles_like.turns.order import ALL, Turns
from miles_like.types import PublishReport
from rollout.sglang.occupation import Occupation
from rollout.wire.bodies import MemoryTag
from tests.support.refusals import refuses

REPORT = PublishReport(version=0, bytes=1, seconds=0.0, pause_seconds=0.0)


@dataclass
class Sides:
    """Both sides, which record the calls, and assert that each is allowed."""

    rng: random.Random
    occupation: Occupation = field(default_factory=lambda: Occupation("http://server"))
    calls: list[str] = field(default_factory=list)
    asleep: set[str] = field(default_factory=set)
    open: bool = False
    weights: int = 0  # of the trainer
    served: int | None = None
    fails: str = ""

    async def pause(self, name: str) -> None:
        self.calls.append(name)
        for _ in range(self.rng.randrange(3)):
            await asyncio.sleep(0)
        if name == self.fails:
            raise OSError(name)

    # servers

    async def release(self, tags: Sequence[MemoryTag]) -> None:
        with self.occupation.releasing(tags):
            await self.pause(f"release {'+'.join(tags)}")
        if MemoryTag.WEIGHTS in tags:
            self.served = None

    async def resume(self, tags: Sequence[MemoryTag]) -> None:
        assert self.asleep == {"trainer", "critic"}, "the servers' memory is the models'"
        self.occupation.resume(tags)
        await self.pause(f"resume {'+'.join(tags)}")

    def published(self) -> None:
        self.occupation.published()

    # the trainer publishes

    async def publish(self, *, version: int) -> PublishReport:
        assert self.asleep == {"trainer", "critic"} and MemoryTag.KV_CACHE in self.occupation.released
        self.occupation.publishing()
        await self.pause(f"publish {version}")
        self.served = self.weights
        return REPORT

    # sampling

    async def sample(self) -> None:
        while not self.open:
            await asyncio.sleep(0)
        with self.occupation.generating():
            await self.pause("sample")


@dataclass
class Model:
    sides: Sides
    name: str

    async def sleep(self) -> dict[str, int]:
        assert self.name not in self.sides.asleep
        await self.sides.pause(f"sleep {self.name}")
        self.sides.asleep.add(self.name)
        return {}

    async def wake(self) -> None:
        assert self.sides.occupation.released == set(ALL), "the models' memory is the servers'"
        self.sides.asleep.remove(self.name)
        await self.sides.pause(f"wake {self.name}")


@dataclass
class Gate:
    sides: Sides

    async def close(self) -> None:
        self.sides.open = False
        while self.sides.occupation.in_flight:
            await asyncio.sleep(0)
        await self.sides.pause("close")

    async def open(self) -> None:
        self.sides.open = True
        await self.sides.pause("open")


def built(seed: int) -> tuple[Sides, Turns]:
    sides = Sides(random.Random(seed))
    with sides.occupation.releasing(ALL):
        pass
    models = [Model(sides, "trainer"), Model(sides, "critic")]
    return sides, Turns(servers=sides, models=models, publisher=sides, background=Gate(sides))


TO_SERVERS = ["sleep trainer", "sleep critic", "resume weights", "publish {}", "resume kv_cache+cuda_graph", "open"]
TO_TRAINER = ["close", "release kv_cache+weights+cuda_graph", "wake trainer", "wake critic"]


def test_the_order_of_a_turn() -> None:
    """Also of a publication in the servers' turn, for which the weights stay."""

    async def run() -> list[str]:
        sides, turns = built(0)
        await turns.publish(version=4)
        async with turns.serving():
            pass
        async with turns.training():
            pass
        async with turns.serving(), turns.serving():
            pass
        await turns.publish(version=5)
        metrics = turns.metrics()
        assert metrics["perf/turn/changes"] == 4 and not any(turns.metrics().values())
        assert set(metrics) == {
            *(f"perf/turn/{part}_s" for part in ("drain", "release", "wake", "sleep", "resume")),
            "perf/turn/changes",
        }
        return sides.calls

    of = lambda version: [call.format(version) for call in TO_SERVERS]  # noqa: E731
    again = ["close", "release kv_cache+cuda_graph", *of(5)[3:]]
    assert asyncio.run(run()) == [*of(4), *TO_TRAINER, *of(4), *again]


@pytest.mark.parametrize("seed", range(40))
def test_random_users_at_once_keep_the_order(seed: int) -> None:
    async def run() -> Sides:
        sides, turns = built(seed)
        rng, version = random.Random(f"users {seed}"), itertools.count(1)
        await turns.publish(version=0)

        async def user() -> None:
            for _ in range(6):
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                kind = rng.choice(["serve", "serve", "score", "publish", "train"])
                if kind == "serve":
                    with suppress(RuntimeError):  # after a training, before its publication
                        async with turns.serving():
                            with sides.occupation.generating():
                                await sides.pause("serve")
                            assert sides.served == sides.weights
                elif kind == "score":
                    async with turns.training():
                        await sides.pause("score")
                        assert not sides.asleep and sides.occupation.released == set(ALL)
                else:
                    if kind == "train":
                        async with turns.training(changes=True):
                            sides.weights += 1
                            await sides.pause("train")
                            assert not sides.asleep
                    await turns.publish(version=next(version))

        async def background() -> None:
            while True:
                await sides.sample()
                await asyncio.sleep(0)

        sampling = asyncio.create_task(background())
        async with asyncio.timeout(20):
            await asyncio.gather(*(user() for _ in range(3)))
        sampling.cancel()
        await asyncio.wait({sampling})
        assert sampling.cancelled(), sampling.exception()
        return sides

    sides = asyncio.run(run())
    assert {"sample", "wake critic"} <= set(sides.calls)


def test_no_request_before_a_publication_that_is_due() -> None:
    async def run() -> None:
        sides, turns = built(0)
        with refuses(RuntimeError, "publish"):
            async with turns.serving():
                pass
        await turns.publish(version=3)
        async with turns.training(changes=True):
            pass
        with refuses(RuntimeError, 3, "publish"):
            async with turns.serving():
                pass
        await turns.publish(version=4)
        async with turns.serving():
            assert not sides.occupation.released

    asyncio.run(run())


@pytest.mark.parametrize(
    "fails", [*TO_TRAINER, "sleep critic", "resume weights", "publish 1", "resume kv_cache+cuda_graph"]
)
def test_after_a_change_that_failed_neither_side_is_entered(fails: str) -> None:
    """The first error is the one to see; what comes after must not reach half a side."""

    async def run() -> None:
        sides, turns = built(0)
        await turns.publish(version=1)
        sides.fails = fails
        with pytest.raises(OSError, match=fails.replace("+", ".")):
            async with turns.training():
                pass
            async with turns.serving():
                pass
        called = len(sides.calls)
        for enter in (turns.serving, turns.training):
            with refuses(RuntimeError, "first error"):
                async with enter():
                    pass
        with refuses(RuntimeError, "first error"):
            await turns.publish(version=2)
        assert len(sides.calls) == called

    asyncio.run(run())

"""Rollout workers that end, lose what they hold, are slow or full: every sample issued is trained once or discarded
once with its reason, and what is trained is freed.

A loop of producer, buffer, feed and ledger over workers that make samples at once; the trainer is a stand-in that asks
for the portions of its ranks. Not covered: Ray (test_actors.py), servers and models (tests/laws).
"""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.batch.packer import Packer
from miles_like.batch.parcel import Parcel
from miles_like.checkpoint.saved_groups import read_groups
from miles_like.cluster.workers import pool
from miles_like.cluster.workers.holder import ColumnHolder
from miles_like.cluster.workers.link import WorkerEnded
from miles_like.cluster.workers.pool import RolloutWorkers
from miles_like.cluster.workers.values import HeldValues
from miles_like.loop.buffer import LOST
from miles_like.records import ColumnsLostError, PlannedBatch, SampleRecord
from miles_like.types import SampleGroup, SamplingParams
from tests.support.local_workers import InMemory, LocalLink, LocalWorkers
from tests.support.refusals import refuses
from tests.support.worker_loop import ALL, PLACE, Loop, Made, made


def looped(
    steps: int,
    factory: Any = None,
    workers: int = 2,
    slow_s: Sequence[float] = (),
    capacity: float = math.inf,
    **more: Any,
) -> Loop:
    async def run() -> Loop:
        start = LocalWorkers([[f"http://{w}"] for w in range(workers)], factory or Made(), slow_s, capacity)
        loop = Loop(start=start, **more)
        await loop.run(steps)
        return loop

    return asyncio.run(run())


def totals(loop: Loop) -> dict[str, float]:
    return {k.removeprefix("ledger/"): v for k, v in loop.ledger.metrics().items()}


def test_every_sample_is_trained_or_discarded_and_freed() -> None:
    loop = looped(4)
    assert len(loop.trained) == 12 == len(set(loop.trained)) and all(int(p) % 3 != 2 for p in loop.trained)
    assert loop.ledger._discarded[ALL] > 0
    assert {link.number: link.worker.holder.keys for link in loop.start.links} == {0: (), 1: ()}
    assert loop.workers.nbytes == 0


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_worker_that_ends_is_replaced_and_its_prompts_are_sampled_again(lockstep: bool) -> None:
    """It ends before ranks pull, with groups of this step and of the next, and once more while it samples."""

    of: Loop = None  # type: ignore[assignment]

    def end(step: int) -> None:
        if step == 1 and len(of.start.links) == 2:
            of.start.links[0].end()

    async def run() -> None:
        nonlocal of
        of = Loop(start=LocalWorkers([["a"], ["b"]], Made()), max_staleness=2, lockstep=lockstep, before_pull=end)
        await of.run(4)

    asyncio.run(run())
    assert len(of.trained) == 12 == len(set(of.trained))
    assert [link.number for link in of.start.links] == [0, 1, 2]
    lost = of.ledger._discarded[LOST]
    found = totals(of)
    assert lost >= 2 and found["issued"] == found["trained"] + found["discarded"] and not found["in_flight"]
    assert len(of.said) == 1 and "worker 0" in of.said[0]
    assert of.buffer.dropped[LOST] == lost / 2  # each of them again under another group id


def test_a_worker_that_ends_while_it_samples_gives_its_prompts_to_the_others() -> None:
    gate = asyncio.Event()

    async def run() -> Loop:
        loop = Loop(start=LocalWorkers([["a"], ["b"]], Made(gate)))
        running = asyncio.create_task(loop.run(2))
        while len(loop.start.links) < 2 or not all(link.worker._shares for link in loop.start.links):
            await asyncio.sleep(0.01)
        loop.start.links[1].end()
        gate.set()
        await running
        return loop

    loop = asyncio.run(run())
    assert len(loop.trained) == 6 == len(set(loop.trained)) and loop.ledger._discarded[LOST] > 0


class StartTwo(LocalWorkers):
    async def __call__(self, slot: int, number: int) -> LocalLink:
        if number >= 2:
            raise RuntimeError("its node is full")
        return await super().__call__(slot, number)


def test_a_worker_that_does_not_start_again_leaves_its_prompts_to_the_others() -> None:
    of: Loop = None  # type: ignore[assignment]

    def end(step: int) -> None:
        if step == 1:
            of.start.links[0].end()

    async def run() -> None:
        nonlocal of
        of = Loop(start=StartTwo([["a"], ["b"]], Made()), before_pull=end)
        await of.run(4)

    asyncio.run(run())
    assert len(of.trained) == 12 == len(set(of.trained))
    assert len(of.said) == 2 and "its node is full" in of.said[1]


def test_a_lost_object_costs_its_group_alone() -> None:
    """The worker goes on; what else the step took waits for the next try."""
    lost: list[str] = []

    of: Loop = None  # type: ignore[assignment]

    def lose(step: int) -> None:
        if step == 1 and not lost:
            holder = of.start.links[0].worker.holder
            key = holder.keys[0]
            lost.append(holder.group(key).prompt.id)
            of.start.links[0].objects.lost.add(id(holder._held[key]))

    async def run() -> None:
        nonlocal of
        of = Loop(start=LocalWorkers([["a"]], Made()), before_pull=lose)
        await of.run(3)

    asyncio.run(run())
    assert len(of.trained) == 9 == len(set(of.trained))
    assert of.ledger._discarded[LOST] == 2 and lost[0] in of.trained and not of.said


def test_a_full_store_admits_no_prompt_before_a_step_is_trained() -> None:
    """The bound holds but for the step that makes room; without it the buffer fills."""
    most: dict[int, int] = {}
    for bound in (1, 1 << 40):
        loop = looped(4, max_staleness=4, bound=bound)
        assert len(loop.trained) == 12
        most[bound] = loop.dealt
    assert most[1] < most[1 << 40]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_store_that_refuses_groups_costs_none_and_admits_no_prompt_before_a_step_is_trained(workers: int) -> None:
    """They stay in the workers' own memory, also those that make room for what a rank gets from one of several that
    share the store."""
    dealt: dict[float, int] = {}
    size = len(pickle.dumps(Parcel(made("0"))))
    for capacity in (3.5 * size, 5.5 * size, math.inf):

        async def run(capacity: float = capacity) -> Loop:
            outside: list[int] = []

            def look(step: int) -> None:
                outside.append(sum(len(link.worker.holder.outside) for link in loop.start.links))

            start = LocalWorkers([[f"{w}"] for w in range(workers)], Made(), capacity=capacity)
            loop = Loop(start=start, max_staleness=4, before_pull=look)
            await loop.run(4)
            assert any(outside) == (capacity < math.inf) == bool(loop.said)
            await asyncio.sleep(0.1)  # what is left is discarded
            assert not any(link.worker.holder.outside for link in loop.start.links) and not loop.workers.full
            return loop

        loop = asyncio.run(run())
        dealt[capacity] = loop.dealt
        assert len(loop.trained) == 12 == len(set(loop.trained))
        found = totals(loop)
        assert LOST not in loop.ledger._discarded and found["issued"] == found["trained"] + found["discarded"]
    assert dealt[3.5 * size] <= dealt[5.5 * size] < dealt[math.inf]


def test_groups_are_in_the_store_again_once_those_that_made_room_are_freed() -> None:
    holder = ColumnHolder(0, InMemory())
    (first, *_), (second, *_) = holder.keep(made("0")), holder.keep(made("1"))
    holder.take_out(holder.copies(holder.references(holder.keys)))
    (third, *_) = holder.keep(made("2"))
    assert set(holder.outside) == {first.key, second.key, third.key}
    holder.free([first.key, third.key])
    (fourth, *_) = holder.keep(made("3"))
    assert set(holder.outside) == {second.key, fourth.key}
    holder.free([second.key, fourth.key])
    holder.keep(made("4"))
    assert not holder.outside


def test_a_store_that_never_has_room_for_a_step_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_ROOM_S", (0.0, 0.0))
    with refuses(RuntimeError, "rollout worker 0", "object_store_memory"):
        looped(1, workers=1, capacity=10.0)


def test_a_slow_worker_delays_its_groups_alone() -> None:
    """Those of the other come first, and while its own are in flight further prompts go to the other."""

    async def run() -> None:
        loop = Loop(start=LocalWorkers([["a"], ["b"]], Made(), (0.5, 0.0)))
        await loop.workers.begin()
        found = loop.workers.groups(0, loop.take(6))
        assert [holder_of((await anext(found))[1]) for _ in range(3)] == [1, 1, 1]
        assert [holder_of(g) async for _, g in loop.workers.groups(1, loop.take(2))] == [1, 1]
        assert [holder_of(g) async for _, g in found] == [0, 0, 0]

    asyncio.run(run())
    assert len(looped(3, slow_s=(0.02, 0.0)).trained) == 9


def holder_of(group: SampleGroup) -> int:
    (number,) = {s.holder for s in group.samples if isinstance(s, SampleRecord)}
    return number


def test_workers_that_end_again_and_again_end_the_run() -> None:
    async def run() -> None:
        loop = Loop(start=LocalWorkers([["a"]], Made(gate := asyncio.Event())))
        running = asyncio.create_task(loop.run(1))
        for _ in range(5):
            while not loop.start.links or loop.start.links[-1]._ended.is_set():
                await asyncio.sleep(0.01)
                if running.done():
                    break
            loop.start.links[-1].end()
        gate.set()
        await running

    with pytest.raises(RuntimeError, match="no rollout worker is left"):
        asyncio.run(run())


def test_the_state_at_a_boundary_is_written_and_taken_over(tmp_path: Path) -> None:
    """Also after what waited there was trained; complete groups get records again, unfinished ones their worker."""

    async def run() -> None:
        loop = Loop(start=LocalWorkers([["a"], ["b"]], Made()))
        await loop.workers.begin()
        prompts = loop.take(4)
        found = {str(i): g async for i, g in loop.workers.groups(0, prompts)}
        kept = {f"ready/{i}": found[i] for i in ("0", "1")}
        await loop.workers.boundary(kept)
        loop.workers.release(list(found.values()))
        files = await loop.workers.write(tmp_path)
        saved = {k: g for name in files for k, g in read_groups(tmp_path / name).items()}
        assert {k for k in saved if k.startswith("ready/")} == set(kept)
        assert torch.equal(saved["ready/1"].samples[1].token_ids, made("1").samples[1].token_ids)

        again = Loop(start=LocalWorkers([["a"], ["b"]], Made()))
        await again.workers.begin()
        back = await again.workers.take_over({tmp_path / name: sha for name, sha in files.items()})
        assert {k: [r.reward for r in g.samples] for k, g in back.items()} == {key: [0.0, 1.0] for key in kept}
        assert set(again.workers._homes.values()) == {0, 1}
        damaged = next(iter(files))
        with open(tmp_path / damaged, "ab") as out:
            out.write(b" ")
        with pytest.raises(ValueError, match="was changed"):
            await again.workers.take_over({tmp_path / damaged: files[damaged]})

    asyncio.run(run())


def test_what_a_worker_does_not_hold_is_named() -> None:
    async def run() -> None:
        loop = Loop(start=LocalWorkers([["a"]], Made()))
        await loop.workers.begin()
        groups = [g async for _, g in loop.workers.groups(0, loop.take(1))]
        (batch,) = Packer(dp_size=1, max_tokens=64).steps(groups, [[1.0, 1.0]])
        assert isinstance(batch, PlannedBatch)
        loop.workers.release(groups)
        await asyncio.sleep(0)
        with pytest.raises(ColumnsLostError) as lost:
            await HeldValues(loop.workers).pull(batch, [PLACE])
        assert lost.value.has_lost(groups[0])
        loop.start.links[0].end()
        with pytest.raises(WorkerEnded):
            await loop.start.links[0].call("held")

    asyncio.run(run())


def test_answers_to_held_out_prompts_come_in_order_and_are_not_held() -> None:
    """Also those of a worker that ends."""

    async def run() -> None:
        loop = Loop(start=LocalWorkers([["a"], ["b"]], Made()))
        await loop.workers.begin()
        loop.start.links[0].end()
        prompts = loop.take(5)
        groups = await loop.workers.answer(None, prompts, n=1, params=SamplingParams(max_new_tokens=4))
        assert [g.prompt for g in groups] == prompts and [g.rewards for g in groups] == [[0.0]] * 5
        assert not await loop.held() and [w.load for w in loop.workers._workers] == [0, 0]

    asyncio.run(run())


def test_every_worker_knows_which_servers_serve_also_one_that_takes_a_place() -> None:
    made_by = Made()

    async def run() -> None:
        start = LocalWorkers([["a"], ["b"]], made_by)
        workers = RolloutWorkers(start=start, tokens=lambda prompt: 1, say=str, bound=1 << 30)
        await workers.begin()
        workers.serve(["b", "c"])
        await workers.abort()
        async with asyncio.timeout(60):
            while len(made_by.served) < 2:
                await asyncio.sleep(0.01)
            start.links[0].end()
            await workers.abort()
            while len(made_by.served) < 3:
                await asyncio.sleep(0.01)
        await workers.close()

    asyncio.run(run())
    assert made_by.served == [["b", "c"]] * 3

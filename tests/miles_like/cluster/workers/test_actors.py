"""Rollout workers as Ray actors: a process that is killed costs its groups, and the driver cannot open what it
passes on.

Not covered: servers, models, several machines.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.exceptions import OwnerDiedError

from miles_like.batch.packer import Packer
from miles_like.batch.parcel import ParcelRefusedError
from miles_like.cluster.placement import Slot
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.cluster.workers import actors
from miles_like.cluster.workers.actors import ActorLink, StartActor
from miles_like.cluster.workers.values import HeldValues
from miles_like.loop.buffer import LOST
from miles_like.nodes.session import start_ray, stop_ray
from miles_like.records import ColumnsLostError, PlannedBatch, PlannedMicroBatch, SampleRecord
from miles_like.types import Prompt
from tests.support.fakes import wait_until
from tests.support.own_ray import this_node
from tests.support.standin_rank import Stand
from tests.support.worker_loop import HALF, MORE, PLACE, Large, Loop, OnUvloop, contents, made, streams


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    start_ray(None)
    yield this_node()
    stop_ray()


async def by_task(cells: Sequence[PlannedMicroBatch], parcels: Sequence[Any]) -> Any:
    """In another process, as a rank is."""
    task: Any = ray.remote(num_cpus=0)(contents)
    return await task.remote(cells, *parcels)


def looped(nodes: Any, logs: Path, factory: Any = None, **more: Any) -> Loop:
    slots = [Slot(role="rollout", index=w, node=0, gpus=()) for w in range(2)]
    start = StartActor(
        nodes=nodes, slots=slots, urls=[["a"], ["b"]], factory=factory or OnUvloop(), logs=logs, silent_s=10.0
    )
    return Loop(start=start, max_staleness=9, fill=by_task, **more)


async def opens_nothing(loop: Loop) -> None:
    """The driver has the references that ranks open. Errors of sampling come to it as they are."""
    groups = [g async for _, g in loop.workers.groups(0, [Prompt(id="300", token_ids=(1,), answer="")])]
    (batch,) = Packer(dp_size=1, max_tokens=64).steps(groups, [[1.0, 1.0]])
    assert isinstance(batch, PlannedBatch)
    pulled = await HeldValues(loop.workers).pull(batch, [PLACE])
    assert len(await by_task(batch.grid[0], pulled.portions[PLACE])) == 2 and pulled.route_bytes
    with pytest.raises(Exception, match="the driver") as refused:
        ray.get(next(iter(pulled.portions[PLACE])))
    assert isinstance(refused.value, ParcelRefusedError) or "ParcelRefusedError" in repr(refused.value)
    with pytest.raises(ValueError, match="invalid literal"):
        [g async for _, g in loop.workers.groups(0, [Prompt(id="x", token_ids=(1,), answer="")])]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_costs_its_groups_and_the_driver_opens_no_values(
    nodes: Any, tmp_path: Path, how: signal.Signals
) -> None:
    """Killed, or stopped: then its stacks are kept, and its process ends, whatever it would still answer."""

    async def run() -> Loop:
        loop = looped(nodes, tmp_path / "logs")
        killed: list[int] = []

        def kill(step: int) -> None:
            link = loop.workers._workers[0].link
            assert isinstance(link, ActorLink)
            if step == 1 and not killed:
                killed.append(ray.get(link.actor.pid.remote()))
                os.kill(killed[0], how)

        loop.before_pull = kill
        await loop.run(3)
        await opens_nothing(loop)
        await loop.workers.close()
        assert wait_until(lambda: not psutil.pid_exists(killed[0]) or state(killed[0]) == "zombie", 20)
        return loop

    loop = asyncio.run(run())
    assert len(loop.trained) == 9 == len(set(loop.trained))
    assert loop.ledger._discarded[LOST] >= 2 and len(loop.said) == 1
    found = loop.ledger.metrics()
    assert found["ledger/issued"] == found["ledger/trained"] + found["ledger/discarded"]
    reports = sorted(tmp_path.glob("stacks/*"))
    assert len(reports) == (how == signal.SIGSTOP) and ("no sign of life for 10 s" in loop.said[0]) == bool(reports)
    for report in reports:
        assert str(report) in loop.said[0] and "rollout worker 0" in report.read_text()


def state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "zombie"


@pytest.mark.slow
def test_values_go_from_ranks_to_workers_and_between_workers(nodes: Any, tmp_path: Path) -> None:
    """And the driver, which opens none, hears the numbers that are computed from them."""
    slots = [Slot(role="trainer", index=i, node=0, gpus=()) for i in range(2)]
    trainer = RayTrainer(Stand("DP2"), slots, nodes, 2, tmp_path)
    packer, prompts = Packer(dp_size=2, max_tokens=64), [Prompt(id=i, token_ids=(1,), answer="") for i in "0134"]

    async def run() -> None:
        loop = looped(nodes, tmp_path)
        await loop.workers.begin()
        trainer.columns = values = HeldValues(loop.workers)
        found = {i: g async for i, g in loop.workers.groups(0, prompts)}
        groups = [found[i] for i in range(len(prompts))]
        assert len({s.holder for g in groups for s in g.samples if isinstance(s, SampleRecord)}) == 2
        (batch,) = packer.steps(groups, only=())
        await values.logprobs(groups, batch, trainer, weights=None, stream=HALF)
        half = {s.name: torch.where(s.loss_mask, s.token_ids / 2, 0.0) for p in prompts for s in made(p.id).samples}
        sums = [[float(half[f"{p.id}/{i}"].sum()) for i in range(2)] for p in prompts]
        assert await values.each("", groups) == sums == await values.gathered("", groups)
        (batch,) = packer.steps(groups, only=(HALF, MORE))
        assert isinstance(batch, PlannedBatch)
        task: Any = ray.remote(num_cpus=0)(streams)
        for row, cells in enumerate(batch.grid):
            pulled = await values.pull(batch, [(row, PLACE[1])])
            assert pulled.route_bytes is None
            for name, of in (await task.remote(cells, *pulled.portions[row, PLACE[1]])).items():
                assert of == {HALF: half[name][1:].tolist(), MORE: (half[name][1:] + 1).tolist()}
        os.kill(ray.get(loop.workers._workers[1].link.actor.pid.remote()), signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(ColumnsLostError) as lost:
            await values.gathered("", groups)
        assert any(lost.value.has_lost(g) for g in groups)
        await loop.workers.close()
        await trainer.close()

    asyncio.run(run())


def test_calls_of_a_silent_worker_end_and_those_of_one_that_answers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a call takes. What a silent worker answers later is not waited for."""
    killed: list[object] = []
    monkeypatch.setattr(actors.ray, "kill", killed.append)

    async def run() -> None:
        silent = asyncio.Event()

        async def pid() -> int:
            if silent.is_set():
                await asyncio.sleep(3600)
            return 7

        async def call(seconds: float) -> str:
            await asyncio.sleep(seconds)
            return "done"

        worker = SimpleNamespace(pid=SimpleNamespace(remote=pid))
        pulse = actors.Pulse(worker, 0.2, lambda: ", its stacks are in x", every_s=0.01)
        assert await pulse.answer(call(0.5)) == "done" and not killed
        late = asyncio.ensure_future(call(0.5))
        calls = [asyncio.create_task(pulse.answer(c)) for c in (late, call(3600))]
        silent.set()
        for one in calls:
            with pytest.raises(actors.WorkerEnded, match=r"no sign of life for 0\.2 s, its stacks are in x"):
                await one
        assert killed == [worker]
        with pytest.raises(actors.WorkerEnded):
            await pulse.answer(call(3600))

    asyncio.run(run())


def test_an_object_that_ray_has_lost_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(reference: Any) -> Any:
        raise OwnerDiedError("00" * 28, None, "")  # type: ignore[no-untyped-call]

    monkeypatch.setattr(ray, "get", lost)
    with pytest.raises(LookupError, match="OwnerDiedError"):
        actors.ObjectStore().get(None)


@pytest.mark.long(beside="tests/miles_like/cluster/workers/test_worker_pool.py")
def test_a_full_object_store_pauses_the_run_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's, of 80 MB, whose disk has no room for more: twelve groups fit, and the buffer may have thirty."""
    stop_ray()  # of the fixture
    monkeypatch.setenv("RAY_local_fs_capacity_threshold", "0.0001")
    plain = ray.init
    monkeypatch.setattr(ray, "init", lambda **given: plain(**{**given, "object_store_memory": 80_000_000}))
    start_ray(None)
    seen: list[tuple[int, bool]] = []

    async def run() -> Loop:
        loop = looped(this_node(), tmp_path, factory=Large())

        def look(step: int) -> None:
            seen.append((sum(len(w.outside) for w in loop.workers._workers), loop.workers.full))

        loop.before_pull = look
        await loop.run(4)
        await loop.workers.close()
        return loop

    try:
        loop = asyncio.run(run())
    finally:
        stop_ray()
    assert any(outside and full for outside, full in seen) and any("is full" in line for line in loop.said), seen
    assert len(loop.trained) == 12 == len(set(loop.trained)) and LOST not in loop.ledger._discarded
    found = loop.ledger.metrics()
    assert found["ledger/issued"] == found["ledger/trained"] + found["ledger/discarded"]

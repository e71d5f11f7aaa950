"""The loop in which servers load weights beside the next step, under fakes.

Not covered here: real trainers and servers (tests/laws/test_load_beside_training.py).
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_like.checkpoint.ledger_audit import audit
from miles_like.loop.overlapped import OverlappedController
from miles_like.loop.recorder import StepRecord
from miles_like.stopping import Stopped
from miles_like.types import PublishReport
from tests.support.loop_world import World
from tests.support.refusals import refuses

LOCKSTEP = {"lockstep": True}


class Beside(World):
    """Servers that load a version in `load_s`, without the trainer."""

    def __init__(
        self, *, load_s: float, fails_at: int | None = None, stop_at_load: int | None = None, **how: Any
    ) -> None:
        super().__init__(**how)
        self.load_s, self.fails_at, self.stop_at_load = load_s, fails_at, stop_at_load
        self.delivery = SimpleNamespace(write=self.write_weights, load=self.load)
        self.controller = partial(OverlappedController, delivery=self.delivery)

    async def publish(self, *, version: int) -> PublishReport:
        raise AssertionError("the trainer does not publish")

    async def write_weights(self, version: int) -> None:
        assert self.version == version - 1, "two versions on their way to the servers"
        self.weights = version
        self.log.append(f"write {version}")

    async def load(self, version: int) -> PublishReport:
        await asyncio.sleep(self.load_s)
        if version == self.fails_at:
            raise RuntimeError(f"server http://x has no version {version}")
        if version == self.stop_at_load:
            self.stop.ask("enough", 9)
        self.version = version
        self.log.append(f"load {version}")
        return PublishReport(version=version, bytes=3, seconds=0.0, pause_seconds=0.0)

    def overlaps(self) -> list[int]:
        """Versions that were loaded after the next step began to train."""
        at = {event: i for i, event in enumerate(self.log)}
        return [v for v in range(1, self.weights + 1) if at[f"load {v}"] > at.get(f"train {v}", len(at))]


def plain(world: World) -> list[tuple[int, dict[str, float]]]:
    return [(s, {n: x for n, x in m.items() if not n.startswith(("perf/", "wall_s"))}) for s, m in world.rows]


@pytest.mark.parametrize("k", [1, 2])
def test_rows_samples_and_ledger_are_those_of_the_plain_loop(k: int, tmp_path: Path) -> None:
    one, other = World(train_s=0.002), Beside(load_s=0.01, train_s=0.002)
    for world, name in ((one, "a"), (other, "b")):
        world.run(7, max_staleness=k, producer=LOCKSTEP, ledger=tmp_path / name, eval_every=3)
    assert plain(one) == plain(other)
    assert one.trained == other.trained and one.staleness == other.staleness
    sampled = [[e for e in w.log if e.startswith("rollout")] for w in (one, other)]
    assert sampled[0] == sampled[1]
    assert audit(tmp_path / "a") == audit(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert other.overlaps() == [1, 2, 4, 5]  # after 3, 6 and 7 the weights are evaluated


def test_a_checkpoint_and_a_check_that_asks_the_trainer_wait_for_the_servers() -> None:
    world = Beside(load_s=0.005)
    world.held = [4]
    world.run(7, max_staleness=1, producer=LOCKSTEP, save_every=2)
    assert world.overlaps() == [1, 3, 5]
    for step in (2, 6):
        assert world.log.index(f"load {step}") < world.log.index(f"save {step}") < world.log.index(f"train {step}")


def test_without_groups_in_the_buffer_the_loop_waits() -> None:
    world = Beside(load_s=0.001)
    world.run(4)  # max_staleness = 0
    assert world.overlaps() == [] and set(world.staleness) == {0}


def test_freely_admitted_prompts_keep_their_bound() -> None:
    """Groups of two steps are taken at once for a while: they still count as outstanding."""
    world = Beside(load_s=0.003, train_s=0.001, rollout_s=0.001)
    world.run(12, max_staleness=1)
    assert world.overlaps() and max(world.staleness) == 1
    assert world.rows[-1][1]["ledger/discarded"] == 0.0


def test_a_load_that_fails_ends_the_run_while_the_next_step_trains() -> None:
    world = Beside(load_s=0.001, fails_at=2, train_s=5.0)
    world.train_s = 0.0

    async def slow(batches: Any, train: Any = world.train) -> Any:
        world.train_s = 60.0 if world.weights == 2 else 0.0
        return await train(batches)

    world.train = slow  # type: ignore[method-assign]
    with refuses(RuntimeError, "http://x", 2):
        world.run(6, max_staleness=1, producer=LOCKSTEP)
    assert "train 2" in world.log and world.version == 1


def test_asked_to_stop_while_servers_load_the_step_that_trains_is_ended_and_saved() -> None:
    world = Beside(load_s=0.005, train_s=0.01, stop_at_load=2)
    with pytest.raises(Stopped):
        world.run(9, max_staleness=1, producer=LOCKSTEP)
    ends = [event for event in world.log if not event.startswith("rollout")]
    assert ends[-2:] == ["save 3", "saved 3"] and world.version == 3


def test_asked_to_stop_before_the_next_step_takes_its_groups_the_boundary_is_saved() -> None:
    world = Beside(load_s=0.005)

    class Asked(OverlappedController):
        async def after(self, record: StepRecord, *, last: bool) -> None:
            await super().after(record, last=last)
            if record.step == 1:
                world.stop.ask("enough", 9)

    world.controller = partial(Asked, delivery=world.delivery)
    with pytest.raises(Stopped):
        world.run(9, max_staleness=1, producer=LOCKSTEP)
    ends = [event for event in world.log if not event.startswith("rollout")]
    assert ends[-3:] == ["load 2", "save 2", "saved 2"]

"""A process of an earlier start writes nothing into the run directory, and nothing that it has written is resumed from.

Not covered: network file systems, whose caches decide when another node sees a new epoch (docs/reliability.md).
"""

from __future__ import annotations

import asyncio
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from miles_like.checkpoint import run_state
from miles_like.checkpoint.best import KeptBest
from miles_like.checkpoint.ledger import Ledger
from miles_like.checkpoint.run_state import RunState
from miles_like.checkpoint.writer import RunCheckpoints, Snapshot
from miles_like.loop.recorder import Recorder, StepRecord
from miles_like.report.progress import PhaseBar
from miles_like.report.sinks import JsonlSink, TensorboardSink
from miles_like.storage.appended_file import AppendedFile, replace_by_copy, truncate_to
from miles_like.storage.fencing import EPOCH_FILE, Fence, StaleEpochError, begun_after, epoch_of
from tests.support.refusals import refuses


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_each_start_raises_the_epoch_and_the_one_before_is_refused_with_both(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = Fence.begin(run_dir)
    first.check()
    second = Fence.begin(run_dir)
    assert (first.epoch, second.epoch, epoch_of(run_dir)) == (1, 2, 2)
    second.check()
    for stale in (first, pickle.loads(pickle.dumps(first))):
        with refuses(StaleEpochError, 1, 2):
            stale.check()
    before = files(run_dir)
    for change in (first.advance, lambda: first.begins(3)):
        with pytest.raises(StaleEpochError):
            change()
    assert files(run_dir) == before


def test_what_ranks_hold_is_stale_once_the_driver_has_raised_its_epoch_again(tmp_path: Path) -> None:
    driver = Fence.begin(tmp_path)
    ranks = pickle.loads(pickle.dumps(driver))
    ranks.check()
    driver.advance()
    driver.check()
    pickle.loads(pickle.dumps(driver)).check()
    with refuses(StaleEpochError, 1, 2):
        ranks.check()


def test_two_starts_that_take_the_same_number_are_told_apart(tmp_path: Path) -> None:
    """On a disk without locks both may read epoch 1 before either writes 2: the one that wrote last stays."""
    Fence.begin(tmp_path)
    read = (tmp_path / EPOCH_FILE).read_text()
    one = Fence.begin(tmp_path)
    (tmp_path / EPOCH_FILE).write_text(read)
    other = Fence.begin(tmp_path)
    assert one.epoch == other.epoch == 2
    other.check()
    with pytest.raises(StaleEpochError):
        one.check()


def test_a_directory_without_its_epoch_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    fence = Fence.begin(tmp_path)
    (tmp_path / EPOCH_FILE).unlink()
    with refuses(StaleEpochError, 1, "was removed"):
        fence.check()
    for text in (
        "",
        "[]",
        '{"epoch": 0}',
        '{"epoch": true}',
        '{"epoch": 2, "begun": [[1]]}',
        '{"epoch": 1, "begun": 3}',
    ):
        (tmp_path / EPOCH_FILE).write_text(text)
        with pytest.raises(ValueError, match=r"epoch\.json|JSON|Expecting"):
            Fence.begin(tmp_path)


class Model:
    """A trained model that has nothing to save."""

    saves = 0

    async def save(self, path: Path, *, asynchronous: bool) -> None:
        self.saves += 1

    async def finish_save(self, *, wait: bool) -> bool:
        return True


def checkpoints(run_dir: Path, fence: Fence, model: Any) -> RunCheckpoints:
    return RunCheckpoints(
        directory=run_dir / "checkpoints",
        models={"trainer": model},
        config={},
        files={},
        best=KeptBest(None),
        keep=3,
        keep_every=None,
        asynchronous=False,
        console=Console(file=io.StringIO()),
        fence=fence,
    )


async def saved(writer: RunCheckpoints, step: int) -> None:
    await writer.begin(step, Snapshot())
    await writer.finish(wait=True)


def test_no_writer_of_a_stale_process_changes_the_directory(tmp_path: Path) -> None:
    """Metrics, curves, ledger, rollouts, and each part of a checkpoint: of the models, of the state, and its name."""
    model, fence = Model(), Fence.begin(tmp_path)
    sink, ledger = JsonlSink(tmp_path / "metrics.jsonl", fence), Ledger(tmp_path / "ledger.jsonl", fence)
    progress = PhaseBar(3, Console(file=io.StringIO()))
    made: Any = {"sink": sink, "ledger": ledger, "progress": progress}
    recorder = Recorder(**made, samples=tmp_path / "rollouts", fence=fence)
    writer, half = checkpoints(tmp_path, fence, model), checkpoints(tmp_path, fence, model)
    board = TensorboardSink(tmp_path / "tensorboard", fence=fence)
    sink.write(1, {"loss": 1.0})
    board.write(1, {"loss": 1.0})
    recorder.check(StepRecord(step=0, progress=progress))
    asyncio.run(saved(writer, 1))
    asyncio.run(half.begin(2, Snapshot()))
    Fence.begin(tmp_path)
    before, saves = files(tmp_path), model.saves
    assert {"metrics.jsonl", "checkpoints/latest", "rollouts/step_1.jsonl"} <= before.keys()
    for write in (
        lambda: sink.write(2, {"loss": 0.5}),
        lambda: board.write(2, {"loss": 0.5}),
        lambda: ledger.file and ledger.file.write("line\n"),
        lambda: recorder.check(StepRecord(step=1, progress=progress)),
        lambda: asyncio.run(writer.save_models(3)),
        lambda: asyncio.run(writer.begin(3, Snapshot())),
        lambda: asyncio.run(half.finish(wait=True)),
    ):
        with pytest.raises(StaleEpochError):
            write()
    board.close()
    assert files(tmp_path) == before and model.saves == saves


def test_a_file_that_was_open_before_a_start_is_none_of_the_directory(tmp_path: Path) -> None:
    """A process can be stopped between its look at the epoch and its write."""
    path = tmp_path / "metrics.jsonl"
    old = AppendedFile(path)
    old.write("one\n")
    at = old.position
    old.write("two\n")
    truncate_to(path, at)
    new = AppendedFile(path)
    old.write("three\n")
    new.write("TWO\n")
    assert path.read_text() == "one\nTWO\n"
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_curves_that_were_open_before_a_start_are_none_of_the_directory(tmp_path: Path) -> None:
    board = TensorboardSink(tmp_path)
    board.write(1, {"loss": 1.0})
    (path,) = tmp_path.iterdir()
    replace_by_copy(path, path.stat().st_size)
    before = path.read_bytes()
    board.write(2, {"loss": 0.5})
    board.close()
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


def test_a_checkpoint_of_a_stale_process_is_not_resumed_from(tmp_path: Path) -> None:
    """Written in spite of the epoch: its process was stopped between the look and the write."""
    where = tmp_path / "checkpoints"

    def save(step: int, epoch: int) -> None:
        run_state.save(where, RunState(step=step, weight_version=step, tokens_total=step, epoch=epoch), keep=9)

    def begin(step: int) -> Fence:
        fence = Fence.begin(tmp_path)
        fence.begins(step)
        return fence

    begin(0)
    save(2, 1)
    begin(2)
    save(3, 2)  # of the run
    assert run_state.load_latest(where) is not None
    save(4, 1)  # of the process before, which had come from step 2 too
    with refuses(ValueError, "step_4", 1, 2, "--from-step", 3):
        run_state.load_latest(where)
    with pytest.raises(ValueError, match="step_4"):
        run_state.go_back(where, 4)
    run_state.go_back(where, 3)
    found = run_state.load_latest(where)
    assert found is not None and found[1].step == 3 and found[1].epoch == 2
    assert begun_after(tmp_path, 1) and not begun_after(tmp_path, 2)

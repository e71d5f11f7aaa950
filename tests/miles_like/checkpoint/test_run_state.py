"""The loop's position survives a kill at any moment.

`latest` must always name a whole checkpoint, so it is written last, in one rename. Not covered: the trainer's own files
in the folder, and power loss (the fsync calls are there; a test cannot cut the power).
"""

from __future__ import annotations

import json
import os

import pytest

from miles_like.checkpoint import run_state
from miles_like.checkpoint.run_state import (
    RunState,
    clear_unfinished,
    empty_folder,
    load,
    load_latest,
    save,
    step_folder,
)
from tests.support.refusals import Facts, refuses


def state(step: int) -> RunState:
    return RunState(step=step, weight_version=step, tokens_total=1000 * step, parts={"prompts": 64 * step})


def test_round_trip_and_keep(tmp_path):
    assert load_latest(tmp_path) is None
    for step in (5, 10, 15, 100):
        folder = step_folder(tmp_path, step)
        folder.mkdir()
        (folder / "trainer.bin").write_text("weights")
        assert save(tmp_path, state(step), keep=2) == folder
    assert load_latest(tmp_path) == (tmp_path / "step_100", state(100))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_100", "step_15"]
    assert (tmp_path / "step_15" / "trainer.bin").exists()


def test_a_later_leftover_neither_counts_nor_pushes_out(tmp_path):
    """A run resumed from step 5 after one that had reached 30: the folder of 30 is no checkpoint of this run."""
    for step in (5, 30):
        save(tmp_path, state(step), keep=5)
    save(tmp_path, state(10), keep=2)
    found = load_latest(tmp_path)
    assert found is not None and found[1].step == 10
    assert (tmp_path / "step_5").exists()


@pytest.mark.parametrize("die_at", [1, 2])
def test_a_kill_before_either_rename_leaves_the_old_checkpoint(tmp_path, monkeypatch, die_at):
    save(tmp_path, state(1), keep=2)
    renames = 0
    real = run_state.Path.replace

    def killed(self, target):
        nonlocal renames
        renames += 1
        if renames == die_at:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(run_state.Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, state(2), keep=2)
    monkeypatch.undo()
    assert load_latest(tmp_path) == (tmp_path / "step_1", state(1))
    save(tmp_path, state(2), keep=2)
    assert load_latest(tmp_path) == (tmp_path / "step_2", state(2))


def test_contents_reach_the_disk_before_the_name(tmp_path, monkeypatch):
    """Renamed before it is synced, a file may be found empty under its final name after a crash."""
    calls: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("sync"))
    real = run_state.Path.replace
    monkeypatch.setattr(run_state.Path, "replace", lambda s, t: (calls.append(f"rename {t.name}"), real(s, t))[1])
    save(tmp_path, state(1), keep=1)
    # the groups, their folder, the folder's name; then the manifest
    assert calls == [*["sync"] * 4, "rename run_state.json", "sync", "sync", "rename latest", "sync"]


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ('{"format": 2, "st', ("step_1", "--fresh")),
        ("[]", ("step_1", "--fresh")),
        ("{}", ("step_1", "--fresh")),
        (json.dumps({"format": 2, "step": 1, "sum": "0" * 64}), ("step_1", "SHA-256")),
        (
            json.dumps({"format": 1, "step": 1, "weight_version": 1, "prompt_cursor": 4, "tokens_total": 9}),
            (1, 2),
        ),
    ],
)
def test_a_manifest_that_is_none_is_named(tmp_path, text, facts: Facts):
    save(tmp_path, state(1), keep=1)
    path = tmp_path / "step_1" / "run_state.json"
    path.write_text(text)
    with refuses(ValueError, "run_state.json", *facts):
        load_latest(tmp_path)


def test_a_checkpoint_under_another_name_is_named(tmp_path):
    save(tmp_path, state(1), keep=1)
    (tmp_path / "step_1").rename(tmp_path / "step_9")
    with refuses(ValueError, "run_state.json", 1):
        load(tmp_path / "step_9")
    with refuses(ValueError, "weight_version", -1):
        RunState(step=1, weight_version=-1, tokens_total=0)


def test_missing_parts_are_named(tmp_path):
    with refuses(ValueError, "run_state.json"):
        load(tmp_path / "step_7")
    save(tmp_path, state(1), keep=1)
    (tmp_path / "latest").write_text("../elsewhere")
    with refuses(ValueError, "../elsewhere", "--from-step", 1):
        load_latest(tmp_path)
    with refuses(ValueError, "checkpoint.keep", 0):
        save(tmp_path, state(2), keep=0)


def test_what_a_killed_run_left_is_cleared_and_whole_checkpoints_stay(tmp_path):
    """Half a checkpoint has no run_state.json, wherever its writer was killed."""
    clear_unfinished(tmp_path / "not yet there")
    for step in (2, 4):
        save(tmp_path, state(step), keep=5)
    (tmp_path / "step_6" / "trainer.partial").mkdir(parents=True)
    (tmp_path / "step_8" / "trainer").mkdir(parents=True)
    (tmp_path / "latest.tmp").write_text("step_")
    clear_unfinished(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_2", "step_4"]
    assert load_latest(tmp_path) == (tmp_path / "step_4", state(4))


def test_a_damaged_latest_checkpoint_is_reported_not_cleared(tmp_path):
    save(tmp_path, state(4), keep=1)
    (tmp_path / "step_4" / "run_state.json").unlink()
    clear_unfinished(tmp_path)
    with refuses(ValueError, "run_state.json"):
        load_latest(tmp_path)
    assert (tmp_path / "step_4").is_dir()


def test_a_resumed_run_saves_over_its_leftovers_but_never_over_the_latest(tmp_path):
    """A run that had reached step 30, resumed from 10, comes past 30 again."""
    for step in (30, 10):
        save(tmp_path, state(step), keep=5)
    assert empty_folder(tmp_path, 30) == step_folder(tmp_path, 30)
    assert not step_folder(tmp_path, 30).exists()
    with refuses(ValueError, "step_10"):
        empty_folder(tmp_path, 10)

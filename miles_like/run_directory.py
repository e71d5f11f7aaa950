"""A run's directory: what a run writes there, and which directories a run may take."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from miles_like.completion import MARKER, files_under
from miles_like.run_state import kept_steps

Mode = Literal["auto", "resume", "fresh"]
SLOW_FACTS = ("logs", "tensorboard", "rollouts", "checkpoints")
# All that a run writes into its directory: what starting over may remove, and nothing else.
RUN_FILES = (
    *SLOW_FACTS,
    "config.toml",
    "metrics.jsonl",
    "ledger.jsonl",
    "report.html",
    "plots",
    "published",
    "verify",
    MARKER,
)


def check_run_dir(run_dir: Path, mode: Mode) -> None:
    """Raises ValueError for what the train stage would refuse: a run that would be lost, one to resume that is not
    there, files of others.

    A directory that is empty can be resumed: a run was killed there before it wrote anything.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"{run_dir} is a file: give a directory with --run-dir, or a path where nothing is")
    if mode == "auto":
        refuse_to_lose(run_dir)
    if mode != "resume":
        _foreign(run_dir)
    elif not run_dir.is_dir() or ((found := list(run_dir.iterdir())) and not any(map(_of_a_run, found))):
        raise ValueError(
            f"--resume: {run_dir} holds no run to go on with: start it without --resume (stages that are complete are "
            "skipped), or give the --run-dir of an existing run"
        )


def refuse_to_lose(run_dir: Path) -> None:
    """A finished run of other inputs, or an unfinished one with a checkpoint, is worth a question."""
    if (run_dir / MARKER).exists():
        raise ValueError(
            f"{run_dir} holds a finished run of other inputs, or changed since: choose another --run-dir, "
            "--resume to train it on, or --fresh to replace it"
        )
    if kept_steps(there := run_dir / "checkpoints") or (there / "latest").exists():  # the first may have no name yet
        raise ValueError(
            f"{run_dir} holds an unfinished run with a checkpoint: --resume goes on from it, --fresh starts over"
        )


def _of_a_run(path: Path) -> bool:
    return path.name in RUN_FILES or path.name.endswith(".partial")


def _foreign(run_dir: Path) -> list[Path]:
    """What an earlier run left. Raises ValueError when there is anything else."""
    found = sorted(run_dir.iterdir()) if run_dir.is_dir() else []
    foreign = [p.name for p in found if not _of_a_run(p)]
    if foreign:
        raise ValueError(
            f"{run_dir} holds {foreign[0]}, which no run writes ({len(foreign)} such in all): "
            "choose another --run-dir, or move it away; nothing was removed"
        )
    return found


def empty(run_dir: Path) -> None:
    """Remove what an earlier run left. Raises ValueError, and removes nothing, when there is anything else."""
    for p in _foreign(run_dir):
        shutil.rmtree(p) if p.is_dir() else p.unlink()


def small_facts(run_dir: Path) -> list[Path]:
    """The files that tell a finished run; logs and checkpoints are left out (large, or still growing)."""
    return [p for p in files_under(run_dir) if p.relative_to(run_dir).parts[0] not in SLOW_FACTS]

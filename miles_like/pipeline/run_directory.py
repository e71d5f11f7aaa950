"""The run directory: which entries a run writes, and which directories a run accepts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from miles_like.checkpoint.run_state import kept_steps
from miles_like.nodes.sight import PROBE
from miles_like.storage.completion import MARKER, files_under
from miles_like.storage.fencing import EPOCH_FILE

Mode = Literal["auto", "resume", "fresh"]
LARGE_ENTRIES = ("logs", "tensorboard", "rollouts", "checkpoints", "stacks", "trackers", "traces", "profiles")
# All entries that a run writes; only these are removed when it starts over.
RUN_FILES = (
    *LARGE_ENTRIES,
    "config.toml",
    "metrics.jsonl",
    "ledger.jsonl",
    "starts.jsonl",
    "tokenizer.json",
    "report.html",
    "plots",  # of earlier versions
    "published",
    "servers",
    "verify",
    "stacks",
    MARKER,
)


def check_run_dir(run_dir: Path, mode: Mode) -> None:
    """Raises ValueError for a directory that the train stage would refuse: with a run that would be lost, without a run
    to resume, or with foreign files.

    An empty directory can be resumed, because a run may be killed before it writes anything.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"{run_dir} is a file: pass a directory, or a path that does not exist, as --run-dir")
    if mode == "auto":
        check_nothing_lost(run_dir)
    if mode != "resume":
        check_own(run_dir)
    elif not run_dir.is_dir() or ((found := list(run_dir.iterdir())) and not any(map(_of_a_run, found))):
        raise ValueError(
            f"--resume: {run_dir} contains no run to resume: start without --resume (complete stages are "
            "skipped), or pass the --run-dir of an existing run"
        )


def check_nothing_lost(run_dir: Path) -> None:
    """Raises ValueError for a directory with a finished run, or with an unfinished one that has a checkpoint."""
    if (run_dir / MARKER).exists():
        raise ValueError(
            f"{run_dir} contains a finished run with a different configuration, or changed files: use another "
            "--run-dir, continue it with --resume, or overwrite it with --fresh"
        )
    if kept_steps(there := run_dir / "checkpoints") or (there / "latest").exists():  # the first may be unnamed yet
        raise ValueError(
            f"{run_dir} contains an unfinished run with a checkpoint: continue it with --resume, or start over "
            "with --fresh"
        )


def _of_a_run(path: Path) -> bool:
    return path.name in (*RUN_FILES, EPOCH_FILE) or path.name.endswith(".partial") or path.name.startswith(PROBE)


def check_own(run_dir: Path) -> list[Path]:
    """Entries of an earlier run. Raises ValueError when there are others."""
    found = sorted(run_dir.iterdir()) if run_dir.is_dir() else []
    foreign = [p.name for p in found if not _of_a_run(p)]
    if foreign:
        raise ValueError(
            f"{run_dir} contains {foreign[0]}, which a run does not write ({len(foreign)} such entries): choose "
            "another --run-dir, or move it away; nothing was removed"
        )
    return found


def clear_run_dir(run_dir: Path) -> None:
    """Remove the entries of an earlier run but its epoch, which processes that are left of it compare with theirs.
    Raises ValueError, and removes nothing, when there are others."""
    for p in check_own(run_dir):
        if p.name == EPOCH_FILE:
            continue
        shutil.rmtree(p) if p.is_dir() else p.unlink()


def summary_files(run_dir: Path) -> list[Path]:
    """A run's files without logs and checkpoints, which are large or still growing."""
    return [p for p in files_under(run_dir) if p.relative_to(run_dir).parts[0] not in (*LARGE_ENTRIES, EPOCH_FILE)]

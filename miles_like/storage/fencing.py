"""The epoch of a run directory: a number that each start raises, so that a process of an earlier one, which was stopped
or cut off and comes back, writes nothing more (a fencing token).

    RUN_DIR/epoch.json    {"epoch": 3, "token": "9f2c...", "host": "node0", "process": 4711, "begun": [[1, 0], [3, 40]]}

A process of the run holds the epoch in which it was started. It reads the file before it writes into the directory or
sends weights to servers, and ends where the file names another start. Between that look and the write it can be
stopped, so what it then writes is of no effect either: files that grow are others from each start on (`truncate_to`),
and a checkpoint names its epoch and is not resumed from where a later one began before its step (`begun`: epoch and
step from which it began).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_like.limits.regular_files import MIB, read_json
from miles_like.storage.completion import write_atomically

EPOCH_FILE = "epoch.json"
_BYTES = 16 * MIB  # largest file that is read


class StaleEpochError(RuntimeError):
    """Another start of the run has taken the place of this process."""


class Fence:
    """The epoch that processes of one start hold. Pickled copies keep theirs when the driver's is raised again."""

    def __init__(self, run_dir: Path, epoch: int, token: str) -> None:
        """token: of the start; two starts at the same moment on a disk without locks may take the same number."""
        self.run_dir, self.epoch, self._token = run_dir.resolve(), epoch, token

    @classmethod
    def begin(cls, run_dir: Path) -> Fence:
        """Raises the epoch of a directory, which is made, on disk. Call it with the directory's lock, and before
        anything is read of what an earlier process may write. Raises ValueError for a file that is not an epoch's."""
        run_dir.mkdir(parents=True, exist_ok=True)
        fence = cls(run_dir, 0, "")
        fence.advance()
        return fence

    def advance(self) -> None:
        """Raises the epoch again, as for ranks that take the place of others: what those hold is stale then. Raises
        StaleEpochError where this process is stale, ValueError as `begin`."""
        if self.epoch:
            self.check()
        found = _read(self.run_dir)
        self.epoch, self._token = found.get("epoch", 0) + 1, secrets.token_hex(16)
        _write(self.run_dir, self.epoch, self._token, found.get("begun", []))

    def begins(self, step: int) -> None:
        """Notes the step from which this epoch begins: later ones of earlier epochs are none of the run any more.
        Raises StaleEpochError."""
        self.check()
        begun = [pair for pair in _read(self.run_dir).get("begun", []) if pair[0] != self.epoch]
        _write(self.run_dir, self.epoch, self._token, [*begun, [self.epoch, step]])

    def check(self) -> None:
        """Raises StaleEpochError where another start has taken the place of this one, OSError where the directory
        cannot be read."""
        try:
            found = _read(self.run_dir)
        except FileNotFoundError:
            found = {}
        if (found.get("epoch"), found.get("token")) == (self.epoch, self._token):
            return
        if not found:
            now = f"{self.run_dir / EPOCH_FILE} was removed"
        else:
            now = f"epoch {found['epoch']} has begun on {found.get('host')} (process {found.get('process')})"
        raise StaleEpochError(
            f"this process is of epoch {self.epoch} of {self.run_dir}, but {now}: it was stopped or cut off, writes "
            "nothing more and ends; the run goes on in the later start"
        )


def epoch_of(run_dir: Path) -> int:
    """The epoch of a directory; 0: it has none. Raises ValueError as `Fence.begin`."""
    epoch: int = _read(run_dir).get("epoch", 0)
    return epoch


def begun_after(run_dir: Path, epoch: int) -> bool:
    """Whether a start of a later epoch than `epoch` has come to its first step. Raises as `epoch_of`."""
    return any(later > epoch for later, _ in _read(run_dir).get("begun", []))


def later_start(run_dir: Path, epoch: int, step: int) -> tuple[int, int] | None:
    """(epoch, its first step) of a later start of the run than `epoch` that began before `step`; None: there is none.
    Raises as `epoch_of`."""
    begun = _read(run_dir).get("begun", [])
    return next(((later, first) for later, first in begun if later > epoch and first < step), None)


def _read(run_dir: Path) -> dict[str, Any]:
    """The content of the file; {} where there is none yet. Raises ValueError for another content."""
    path = run_dir / EPOCH_FILE
    if not path.exists():
        return {}
    found = read_json(path, _BYTES)
    begun = found.get("begun", []) if isinstance(found, dict) else None
    pairs = isinstance(begun, list) and all(
        isinstance(pair, list) and [type(x) for x in pair] == [int, int] for pair in begun
    )
    if not (isinstance(found, dict) and type(found.get("epoch")) is int and found["epoch"] > 0 and pairs):
        raise ValueError(f"{path} holds no epoch of a run: remove it, if no process of the run is left anywhere")
    return found


def _write(run_dir: Path, epoch: int, token: str, begun: Sequence[object]) -> None:
    content = {"epoch": epoch, "token": token, "host": socket.gethostname(), "process": os.getpid(), "begun": begun}
    write_atomically(run_dir / EPOCH_FILE, json.dumps(content) + "\n")
    directory = os.open(run_dir, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)

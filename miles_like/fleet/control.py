"""Files between a run and `miles-like servers`: what the run reports of its servers, and what users ask of it.

RUN_DIR/servers/status.json is replaced at each change of a state. RUN_DIR/servers/requests.jsonl is appended to by
users; a run reads what is appended while it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from miles_like.types import Json

FOLDER = "servers"
COLUMNS = ("server", "state", "version", "restarts_left", "url", "why")  # of `miles-like servers list`
Verb = Literal["add", "remove"]


class Request(NamedTuple):
    """What a user asks of a run. server: the number of the one to remove."""

    verb: Verb
    server: int | None = None


def ask(run_dir: Path, request: Request) -> None:
    """Append a request, in one write. Raises ValueError as `status`, and for a run that has ended."""
    if status(run_dir)["ended"]:
        raise ValueError(f"the run in {run_dir} has ended, so that it has no servers: start it again with --resume")
    line = json.dumps(request._asdict()) + "\n"
    fd = os.open(run_dir / FOLDER / "requests.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def status(run_dir: Path) -> dict[str, Any]:
    """What a run has reported last: "ended", and "servers" as `Roster.rows`. Raises ValueError where it has reported
    nothing."""
    path = run_dir / FOLDER / "status.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{path} does not exist: pass the --run-dir of a run that samples and whose servers are up; a run with "
            "turns, or with rollout.restarts = 0 and rollout.min_servers = rollout.servers, does not watch them"
        ) from None
    except ValueError as e:
        raise ValueError(f"{path} is not JSON ({e}): remove it, the run writes it again") from None
    return found


@dataclass(slots=True)
class ControlFiles:
    """The run's side."""

    run_dir: Path
    _read: int = field(default=0, init=False)  # bytes

    def __post_init__(self) -> None:
        """What was asked of an earlier process of the run is passed over."""
        (self.run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        if self._requests.exists():
            self._read = self._requests.stat().st_size

    @property
    def _requests(self) -> Path:
        return self.run_dir / FOLDER / "requests.jsonl"

    def asked(self) -> list[Request | str]:
        """What is new; a line that is no request is the sentence that refuses it."""
        try:
            if self._requests.stat().st_size <= self._read:
                return []
            with self._requests.open("rb") as f:
                f.seek(self._read)
                whole, _, _ = f.read(1 << 16).rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._read += len(whole) + 1 if whole else 0
        return [_read(line) for line in whole.split(b"\n") if line]

    def write(self, servers: Sequence[Json], *, ended: bool = False) -> None:
        """A run goes on where the disk is full: the console has the changes too."""
        path = self.run_dir / FOLDER / "status.json"
        part = path.with_suffix(".part")
        with contextlib.suppress(OSError):
            part.write_text(json.dumps({"ended": ended, "pid": os.getpid(), "at": time.time(), "servers": servers}))
            part.replace(path)


def _read(line: bytes) -> Request | str:
    try:
        found = json.loads(line)
        match found:
            case {"verb": "add"}:
                return Request("add")
            case {"verb": "remove", "server": int(server)}:
                return Request("remove", server)
    except ValueError:
        pass
    shown = line[:80].decode("utf-8", "replace")
    return f'a line of requests.jsonl is neither {{"verb": "add"}} nor {{"verb": "remove", "server": N}}: {shown!r}'

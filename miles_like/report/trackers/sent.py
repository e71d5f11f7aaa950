"""What a tracker has of a run, in `trackers/NAME.json` of the run directory: a resumed run goes on from there."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from miles_like.limits.regular_files import MIB, check_inside, parse_json, read_own, replace_bytes

FOLDER = "trackers"


class ReplacedError(RuntimeError):
    """Another process sends the run's rows to this tracker."""


@dataclass(slots=True)
class Sent:
    """The state of one tracker. Steps count from 0, the row before the first step; -1: none."""

    run_id: str = field(default_factory=lambda: secrets.token_hex(4))  # of the run in the tracker
    step: int = -1  # the last step whose row was handed to the tracker's client
    table: int = -1  # the last step whose samples were
    owner: str = ""  # the process that sends
    error: str = ""  # why the last attempt failed; "": it did not
    finished: bool = False  # the client has confirmed all that it was given

    def write(self, run_dir: Path, name: str) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        replace_bytes(state_file(run_dir, name), (json.dumps(asdict(self)) + "\n").encode())

    def claim(self, run_dir: Path, name: str) -> None:
        """Makes this process the one that sends."""
        self.owner, self.error, self.finished = secrets.token_hex(8), "", False
        self.write(run_dir, name)

    def check(self, run_dir: Path, name: str) -> None:
        """Raises ReplacedError where another process has claimed the tracker: this one belongs to an earlier start."""
        if read_sent(run_dir, name).owner != self.owner:
            raise ReplacedError(f"{name}: another process sends this run's rows")


def state_file(run_dir: Path, name: str) -> Path:
    return run_dir / FOLDER / f"{name}.json"


def read_sent(run_dir: Path, name: str) -> Sent:
    """The state; a new one where there is none. Raises ValueError for a file that is not a state's."""
    path = state_file(run_dir, name)
    check_inside(path, run_dir)
    if not path.exists():
        return Sent()
    found = parse_json(read_own(path, run_dir, MIB))
    kinds = {"run_id": str, "step": int, "table": int, "owner": str, "error": str, "finished": bool}
    if not isinstance(found, dict) or {k: type(v) for k, v in found.items()} != kinds:
        raise ValueError(f"{path} is not the state of a tracker: remove it, and the run is shown as a new one there")
    return Sent(**found)

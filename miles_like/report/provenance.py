"""When, where and by which command a run was started: a line of its `starts.jsonl` for each start and resume."""

from __future__ import annotations

import contextlib
import json
import platform
import shlex
import socket
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from miles_like.limits.regular_files import MIB, check_inside, parse_json, read_own

STARTS = "starts.jsonl"
PACKAGES = ("miles-like", "torch", "megatron-core", "transformers", "ray")


def note_start(run_dir: Path) -> None:
    """Append a line about this process."""
    line = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(Path.cwd()),
        "versions": {"python": platform.python_version(), **_versions()},
    }
    path = run_dir / STARTS
    check_inside(path, run_dir)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def starts(run_dir: Path) -> list[Mapping[str, object]]:
    """The lines, in order; those that are no objects, as of a process that was killed meanwhile, are left out."""
    path = run_dir / STARTS
    if not path.exists():
        return []
    found = []
    for line in read_own(path, run_dir, MIB).decode("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError):
            found.append(parse_json(line))
    return [one for one in found if isinstance(one, dict)]


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit(directory: Path) -> str | None:
    """The commit that is checked out where `directory` lies, read from git's files; None outside of a repository."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for folder in (directory, *directory.parents):
            git = folder / ".git"
            if git.is_file():  # of another work tree: its text is `gitdir: PATH`
                git = folder / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
            if (git / "HEAD").is_file():
                return _head(git)
    return None


def _head(git: Path) -> str | None:
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref: "):
        return head
    ref = head.removeprefix("ref: ")
    common = git / "commondir"
    shared = git / common.read_text(encoding="utf-8").strip() if common.is_file() else git
    for file in (git / ref, shared / ref):
        if file.is_file():
            return file.read_text(encoding="utf-8").strip()
    packed = shared / "packed-refs"
    lines = packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else []
    return next((line.split(" ")[0] for line in lines if line.endswith(f" {ref}")), None)

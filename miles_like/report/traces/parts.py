"""The files of spans that the processes of a run append to (miles_like.spans), read as they grow."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_like.limits.regular_files import check_inside, open_regular, parse_json


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSpan:
    """A span of a process. Times in nanoseconds, by the driver's clock, as `time.time_ns` counts."""

    process: str
    pid: int
    name: str
    start: int
    took: int
    beside: bool  # others of its kind run at the same time
    args: dict[str, Any]

    @property
    def end(self) -> int:
        return self.start + self.took


@dataclass(slots=True)
class _Part:
    offset: int = 0
    head: dict[str, Any] = field(default_factory=dict)


class Parts:
    """The files in `folder`. ahead: nanoseconds by which the clock of a host is ahead."""

    def __init__(self, folder: Path, ahead: Callable[[str], int]) -> None:
        self._folder, self._ahead = folder, ahead
        self._parts: dict[str, _Part] = {}

    def new(self) -> list[TracedSpan]:
        """The spans that were written since the last call."""
        found: list[TracedSpan] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            found += self._of(path, self._parts.setdefault(path.name, _Part()))
        return found

    def _of(self, path: Path, part: _Part) -> list[TracedSpan]:
        check_inside(path, self._folder)
        found = []
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(part.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # of which more is to come
                part.offset += len(line)
                values = parse_json(line)
                if isinstance(values, dict):
                    part.head = values
                elif isinstance(values, list) and len(values) == 5 and part.head:
                    name, start, took, beside, args = values
                    found.append(
                        TracedSpan(
                            process=str(part.head.get("process")),
                            pid=int(part.head.get("pid", 0)),
                            name=str(name),
                            start=int(start) - self._ahead(str(part.head.get("host"))),
                            took=int(took),
                            beside=bool(beside),
                            args=dict(args),
                        )
                    )
        return found

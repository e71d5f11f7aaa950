"""The files of spans that the processes of a run append to (miles_like.spans), read as they grow."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from miles_like.limits.regular_files import check_inside, open_regular


class TracedSpan(NamedTuple):
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
        """The spans that were written since the last call. Raises ValueError for files that `spans` did not write."""
        found: list[TracedSpan] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            found += self._of(path, self._parts.setdefault(path.name, _Part()))
        return found

    def _of(self, path: Path, part: _Part) -> list[TracedSpan]:
        check_inside(path, self._folder)
        found: list[TracedSpan] = []
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(part.offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # of the last line more may be to come
        part.offset += len(whole)
        for line in whole.splitlines():
            values = orjson.loads(line)
            if isinstance(values, dict):
                part.head = values
            elif part.head:
                name, start, took, beside, args = values
                start -= self._ahead(part.head["host"])
                found.append(TracedSpan(part.head["process"], part.head["pid"], name, start, took, beside, args))
        return found

"""A bound on the size of a server's log."""

from __future__ import annotations

import logging
from collections import Counter

_FIRST = 20  # first lines of a kind that are written; then the 100th, the 1,000th, ...
_KINDS = 1000
_TOTAL = 8 << 20  # bytes; a traceback counts 8 KiB
_TRACEBACK = 8 << 10


class LogLimit(logging.Filter):
    """Passes the first lines of a kind, then ever fewer, and none after `_TOTAL` bytes.

    A kind is a logger, a message before formatting, and the type of an exception.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: Counter[tuple[str, str, object]] = Counter()
        self._left = _TOTAL

    def filter(self, record: logging.LogRecord) -> bool:
        if self._left <= 0:
            return False
        kind = (record.name, str(record.msg), record.exc_info and record.exc_info[0])
        if kind not in self._seen and len(self._seen) >= _KINDS:
            kind = (record.name, "", None)
        self._seen[kind] += 1
        count = self._seen[kind]
        if count > _FIRST:
            if str(count).strip("0") != "1":
                return False
            record.msg, record.args = f"{record.getMessage().strip()} ({count:,} times so far)", None
        self._left -= len(record.getMessage()) + (_TRACEBACK if record.exc_info else 0)
        if self._left <= 0:
            record.msg, record.args, record.exc_info = "the log is full: nothing more is written", None, None
        return True

"""Spans: when each phase of a process begins and how long it takes, for traces (docs/tracing.md). Without torch.

Nothing is recorded before `begin`: a span then costs a call. Afterwards a process appends its spans to its own
file, a line each, at most FLUSH_S after they end or when FLUSH_SPANS are there; times are those of its node's clock.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

FLUSH_S = 1.0
FLUSH_SPANS = 256
SHORTEST_NS = 100_000  # of work beside others that is recorded: a step has thousands of instant rewards


class Span:
    """A context: the time of its body. `beside`: others of its kind run at the same time in this process."""

    __slots__ = ("_beside", "_name", "_recorder", "_since", "_start", "args")

    def __init__(self, recorder: Recorder | None, name: str, beside: bool, args: dict[str, Any]) -> None:
        self._recorder, self._name, self._beside, self.args = recorder, name, beside, args

    def add(self, **args: Any) -> None:
        """Arguments that are known later."""
        self.args |= args

    def __enter__(self) -> Self:
        self._start, self._since = time.time_ns(), time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._recorder is not None, "only `_Nothing` has none"
        if kind is not None:
            self.args["error"] = kind.__name__
        took = time.perf_counter_ns() - self._since
        if took >= SHORTEST_NS or not self._beside:
            self._recorder.record(self._name, self._start, took, self._beside, self.args)


class _Nothing(Span):
    """Where nothing is recorded."""

    __slots__ = ()

    def add(self, **args: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


_NOTHING = _Nothing(None, "", False, {})


class Recorder:
    """Appends the spans of this process to `folder`/PROCESS.PID.jsonl, from the first one on."""

    def __init__(self, folder: Path, process: str) -> None:
        self.process, self.path = process, folder / f"{process}.{os.getpid()}.jsonl"
        self._lines: list[tuple[str, int, int, bool, dict[str, Any]]] = []
        self._lock, self._flushed, self._head = threading.Lock(), time.monotonic(), False

    def record(self, name: str, start: int, took: int, beside: bool, args: dict[str, Any]) -> None:
        """start: nanoseconds as `time.time_ns` counts; took: nanoseconds."""
        with self._lock:
            self._lines.append((name, start, took, beside, args))
            due = len(self._lines) >= FLUSH_SPANS or time.monotonic() - self._flushed >= FLUSH_S
        if due:
            self.flush()

    def flush(self) -> None:
        """Writes what there is in one call. A file that cannot be written ends the recording, not the process."""
        with self._lock:
            lines, self._lines, self._flushed = self._lines, [], time.monotonic()
            if not lines:
                return
            text = b"".join(orjson.dumps(line, default=str, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
            if not self._head:
                head = {"process": self.process, "pid": os.getpid(), "host": socket.gethostname()}
                text, self._head = orjson.dumps(head, option=orjson.OPT_APPEND_NEWLINE) + text, True
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("ab") as file:
                    file.write(text)
            except OSError:
                end()


_recorder: Recorder | None = None


def begin(folder: Path, process: str) -> None:
    """Records the spans of this process from now on, until `end`."""
    global _recorder
    _recorder = Recorder(folder, process)
    atexit.register(_recorder.flush)


def end() -> None:
    global _recorder
    _recorder = None


def flush() -> None:
    """Call it when a process may get nothing to do, or be killed."""
    if _recorder is not None:
        _recorder.flush()


def on() -> bool:
    """Whether spans are recorded: arguments that take time to compute need not be computed otherwise."""
    return _recorder is not None


def span(name: str, **args: Any) -> Span:
    """A phase of this process: those that are open at the same time are within each other. Arguments become JSON."""
    return _NOTHING if _recorder is None else Span(_recorder, name, False, args)


def beside(name: str, **args: Any) -> Span:
    """Work of which several parts are under way at the same time, as requests are."""
    return _NOTHING if _recorder is None else Span(_recorder, name, True, args)


def ended(name: str, seconds: float, **args: Any) -> None:
    """A phase that ends now and took `seconds`."""
    if _recorder is not None:
        took = int(seconds * 1e9)
        _recorder.record(name, time.time_ns() - took, took, False, args)


class Stretch:
    """Many short pieces of work as one span for each `every_s` seconds in which there were some."""

    def __init__(self, name: str, every_s: float = 0.25) -> None:
        self._name, self._every = name, int(every_s * 1e9)
        self._start, self._count = 0, 0

    def note(self, worked: bool) -> None:
        """After each piece. worked: False: there was nothing to do, which ends the stretch."""
        if _recorder is None:
            return
        now = time.time_ns()
        if self._count and (not worked or now - self._start >= self._every):
            _recorder.record(self._name, self._start, now - self._start, False, {"pieces": self._count})
            self._count = 0
        if worked:
            self._start = self._start if self._count else now
            self._count += 1

"""Writes the spans of all processes of a run to a file for each window of steps, and sends them on."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from socket import gethostname
from typing import Protocol

from miles_like import spans
from miles_like.config.sections.watched.tracing import TraceConfig
from miles_like.report.traces.chrome import write_trace
from miles_like.report.traces.clocks import Ask, NodeClocks
from miles_like.report.traces.parts import Parts, TracedSpan

FOLDER = "traces"
END_S = 20.0  # for what is left at the end of a run
_FOR_EVER = 1 << 62


class Export(Protocol):
    """Another receiver of the spans."""

    def send(self, found: Sequence[TracedSpan]) -> None:
        """Raises RuntimeError where they do not arrive."""


def parts_of(run_dir: Path) -> Path:
    """The folder in which the processes of a run record their spans."""
    return run_dir.resolve() / FOLDER / "parts"


class TraceWriter:
    """A MetricSink: each row ends a step. A thread writes a window once the step after it has ended, when all processes
    have written what they recorded in it. say: called with each sentence for the user."""

    def __init__(
        self, settings: TraceConfig, run_dir: Path, say: Callable[[str], None], export: Export | None = None
    ) -> None:
        self._settings, self._folder, self._say = settings, run_dir / FOLDER, say
        self._export, self._failed = export, set[str]()
        self.clocks = NodeClocks(gethostname())
        self._boundaries: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._pending: list[TracedSpan] = []  # of later windows
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Records the driver's spans from now on. What an earlier start left in parts is written to a file first."""
        if not self._settings.on or self._thread is not None:
            return
        parts = parts_of(self._folder.parent)
        if left := Parts(parts, self.clocks.ahead).new():
            write_trace(self._folder / f"until_{time.strftime('%Y%m%dT%H%M%S')}.json", left, {})
        shutil.rmtree(parts, ignore_errors=True)
        spans.begin(parts, "driver")
        self._parts = Parts(parts, self.clocks.ahead)
        self._thread = threading.Thread(target=self._write_windows, daemon=True, name="traces")
        self._thread.start()

    def ask(self, asks: Sequence[Ask]) -> None:
        """The processes whose clocks are compared with this one's, one on each other node."""
        self.clocks.asks = asks

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._thread is not None:
            self._boundaries.put((step, time.time_ns()))

    def close(self) -> None:
        """The thread goes on until `end`."""

    def end(self) -> None:
        """Writes what is left, once all processes have ended, within END_S."""
        if self._thread is None:
            return
        spans.flush()
        spans.end()
        self._boundaries.put(None)
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._say(f"the last trace was not written within {END_S:g} s: its spans are in {self._folder / 'parts'}")
        self._thread = None

    def _write_windows(self) -> None:
        began: int | None = None  # first step of the window that is open
        complete: tuple[int, int, int] | None = None  # first and last step of the window before, and when that ended
        last = 0
        while (boundary := self._boundaries.get()) is not None:
            step, at = boundary
            if complete is not None:
                self._window(*complete)
                complete = None
            if not step:  # the row before the first step
                continue
            began, last = began or step, step
            if step % self._settings.window == 0:
                complete, began = (began, step, at), step + 1
        self._window(*(complete or (began or last + 1, last, 0))[:2], _FOR_EVER)
        if "file" not in self._failed:
            shutil.rmtree(self._folder / "parts", ignore_errors=True)

    def _window(self, first: int, last: int, until: int) -> None:
        """Writes and exports the spans that began before `until`."""
        self.clocks.measure()
        spans.flush()
        self._pending += self._parts.new()
        found = with_samples([span for span in self._pending if span.start < until])
        self._pending = [span for span in self._pending if span.start >= until]
        offsets = {host: [o.ahead / 1e9, o.error / 1e9] for host, o in self.clocks.offsets.items()}
        about = {"steps": [first, last], "seconds ahead of the driver's clock, and error": offsets}
        name = f"steps_{first:06d}-{last:06d}" if last >= first else "before_the_first_step"
        try:
            write_trace(_unused(self._folder / f"{name}.json"), found, about)
        except OSError as e:
            self._note("file", e)
        try:
            if self._export is not None:
                self._export.send(found)
        except RuntimeError as e:
            self._note("export", e)

    def _note(self, what: str, error: Exception) -> None:
        """Says each kind of failure once."""
        if what not in self._failed:
            self._say(f"traces: {error}; the run goes on")
        self._failed.add(what)


def with_samples(found: Sequence[TracedSpan]) -> list[TracedSpan]:
    """Spans of servers, which know requests by their ids alone, with the samples of these."""
    samples: dict[str, list[str]] = {}
    for span in found:
        if span.name == "request":
            samples |= dict.fromkeys(span.args.get("rids", ()), span.args.get("samples", []))
    out = []
    for span in found:
        rids = span.args.get("rids")
        if span.name == "generate" and rids:
            known = dict.fromkeys(name for rid in rids for name in samples.get(rid, ()))
            span = span._replace(args={**span.args, "samples": list(known)})
        out.append(span)
    return out


def _unused(path: Path) -> Path:
    """The path, with a number where there is such a file: of steps that are trained again."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}_{number}.json")
    return free


def trace_files(run_dir: Path) -> list[Path]:
    """The files of the windows, in the order of their steps."""
    return sorted((run_dir / FOLDER).glob("steps_*.json"))

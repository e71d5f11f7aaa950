"""Metric sinks: a JSON lines file, TensorBoard. The console's is in console.py."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from miles_like.protocols import Fencing, MetricSink
from miles_like.report.rows import json_row
from miles_like.storage.appended_file import AppendedFile


class JsonlSink:
    """`metrics.jsonl`: one object per step, appended and flushed, so that a killed run keeps its metrics."""

    def __init__(self, path: Path, fence: Fencing | None = None) -> None:
        self.file = AppendedFile(path, fence)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.file.write(json_row(step, metrics) + "\n")

    def close(self) -> None:
        self.file.close()


class TensorboardSink:
    """An event file under `folder`. Points of earlier files after step `first` are purged: all of them with first = 0.

    The file is open for as long as the sink, as TensorBoard's own writer does not keep it: that one opens it by its
    name for each write, and would write into the copy by which a resumed run replaces it (`replace_by_copy`).
    """

    def __init__(self, folder: Path, *, first: int = 0, fence: Fencing | None = None) -> None:
        """fence: checked before each row; None: the directory has no epochs."""
        self._fence = fence
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter((folder / name).open("xb"))
        self._add(Event(file_version="brain.Event:2"))
        purged = first + 1 if first else 0
        self._add(Event(step=purged, session_log=SessionLog(status=SessionLog.START)))
        self._records.flush()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises as `Fencing.check`, and has written nothing then."""
        if self._fence is not None:
            self._fence.check()
        values = [Summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self._add(Event(step=step, summary=Summary(value=values)))
        self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())


class MultiSink:
    """Writes to several sinks in turn."""

    def __init__(self, sinks: Iterable[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

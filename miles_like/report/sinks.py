"""Metric sinks: a JSON lines file, TensorBoard. The console's is in console.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

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
    """Event files under `folder`. Points of earlier files after step `first` are purged: all of them with first = 0."""

    def __init__(self, folder: Path, *, first: int = 0, fence: Fencing | None = None) -> None:
        """fence: checked before each row; None: the directory has no epochs."""
        self._fence = fence
        self._writer = SummaryWriter(str(folder), purge_step=first + 1 if first else 0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises as `Fencing.check`, and has written nothing then."""
        if self._fence is not None:
            self._fence.check()
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()  # its thread would write later, without a look at the epoch

    def close(self) -> None:
        self._writer.close()


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

"""Spans of a trainer rank, and profiles of chosen steps by torch.profiler: what its process begins before its model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from miles_like import spans
from miles_like.types import MicroBatch


@dataclass(frozen=True, slots=True)
class Observed:
    """What is recorded of the ranks of a role. traces, profiles: folders; None: no spans, no profiles. steps, ranks:
    which are profiled."""

    role: str
    traces: Path | None = None
    profiles: Path | None = None
    steps: range = range(0)
    ranks: tuple[int, ...] = ()

    def begin(self, rank: int) -> None:
        """In the process of a rank."""
        global _profiler
        if self.traces is not None:
            spans.begin(self.traces, f"{self.role}_rank{rank}")
        if self.profiles is not None and rank in self.ranks:
            _profiler = _Profiler(self.profiles, f"{self.role}_rank{rank}", self.steps)


NOTHING = Observed("trainer")


def contents(shards: Sequence[Sequence[MicroBatch]]) -> dict[str, Any]:
    """Of a rank's batch, as arguments of a span: its samples, its tokens, micro-batches of an optimizer step."""
    cells = [micro for shard in shards for micro in shard]
    return {
        "samples": [name for micro in cells for name in micro.samples if name],
        "tokens": sum(len(micro.tokens) for micro in cells),
        "micros": len(cells) / max(len(shards), 1),
    }


@dataclass(frozen=True, slots=True)
class _Profiler:
    folder: Path
    name: str
    steps: range

    @contextmanager
    def around(self, call: str, version: int) -> Iterator[None]:
        """One file a call: a trace of its operators, and on a GPU the snapshot of its allocations."""
        where = self.folder / f"step_{version}"
        where.mkdir(parents=True, exist_ok=True)
        on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with contextlib.ExitStack() as stack:
            if on_gpu:
                torch.cuda.memory._record_memory_history(max_entries=1_000_000)
                stack.callback(torch.cuda.memory._record_memory_history, enabled=None)
                stack.callback(torch.cuda.memory._dump_snapshot, str(where / f"{self.name}_{call}.pickle"))
            profiled = stack.enter_context(profile(activities=activities, profile_memory=True, record_shapes=True))
            yield
        profiled.export_chrome_trace(str(where / f"{self.name}_{call}.json.gz"))


_profiler: _Profiler | None = None


def profiled(call: str, version: int) -> AbstractContextManager[None]:
    """Profiles a call of a rank where its step is chosen. version: that the weights have after the step."""
    if _profiler is None or version not in _profiler.steps:
        return nullcontext()
    return _profiler.around(call, version)

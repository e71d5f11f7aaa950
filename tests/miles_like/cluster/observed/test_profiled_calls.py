"""What is kept of a profiled call.

CUDA's allocator alone records the history of allocations, so that a snapshot itself is seen on a GPU only. Here: that
the calls of torch which make one are made in the right order, with arguments that they take, for the chosen steps.
"""

from __future__ import annotations

import contextlib
import gzip
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.cluster.observed import profiling
from miles_like.cluster.observed.profiling import Observed, profiled


@pytest.fixture(autouse=True)
def no_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_profiler", None)


def begin(folder: Path, rank: int = 1) -> None:
    Observed("trainer", profiles=folder, steps=range(2, 3), ranks=(1,)).begin(rank)


def test_a_trace_of_operators_is_kept_of_the_chosen_steps_and_ranks(tmp_path: Path) -> None:
    begin(tmp_path, rank=0)
    with profiled("train", 2):
        pass
    begin(tmp_path)
    for step in (1, 2, 3):
        with profiled("train", step):
            torch.ones(64, 64) @ torch.ones(64, 64)
    (kept,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert kept.relative_to(tmp_path).as_posix() == "step_2/trainer_rank1_train.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(kept.read_bytes()))["traceEvents"]}
    assert {"aten::mm", "[memory]"} <= names


def test_on_a_gpu_a_snapshot_is_dumped_before_its_history_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a call that fails, as one that runs out of memory."""
    called: list[tuple[str, Any]] = []

    def noted(of: Callable[..., Any], name: str) -> Callable[..., None]:
        def call(*given: Any, **keys: Any) -> None:
            bound = inspect.signature(of).bind(*given, **keys).arguments
            called.append((name, bound["filename"] if name == "dump" else bound.get("enabled", "all")))

        return call

    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_dump_snapshot", noted(memory._dump_snapshot, "dump"))
    monkeypatch.setattr(memory, "_record_memory_history", noted(memory._record_memory_history, "record"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profiling, "profile", lambda **keys: contextlib.nullcontext())
    begin(tmp_path)
    with pytest.raises(MemoryError), profiled("train", 2):
        called.append(("body", None))
        raise MemoryError
    file = str(tmp_path / "step_2" / "trainer_rank1_train.pickle")
    assert called == [("record", "all"), ("body", None), ("dump", file), ("record", None)]

"""High-water marks of memory: of ranks, and of the object stores."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch

from miles_like.cluster.observed import memory
from miles_like.cluster.observed.memory import RankMemory, StoreMemory, largest
from miles_like.limits import memory_size
from miles_like.limits.memory_size import oom_kills, peak_host_bytes

PAGE = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()


def test_the_peak_of_a_process_grows_with_what_it_has_held_and_never_falls() -> None:
    """Against the kernel's own figure, VmHWM of /proc/self/status."""
    before = peak_host_bytes()
    held = bytearray(int(before) + (64 << 20))  # more than it has held in all
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    grown = peak_host_bytes()
    del held
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:"))
    assert grown >= before + (32 << 20) and peak_host_bytes() >= grown
    assert peak_host_bytes() == pytest.approx(int(line.split()[1]) * 1024, rel=0.05)


def test_kills_are_counted_from_the_first_look_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert oom_kills() >= 0
    monkeypatch.setattr(memory, "oom_kills", lambda: 7)
    rank = RankMemory()
    monkeypatch.setattr(memory, "oom_kills", lambda: 9)
    assert rank.metrics()["perf/memory/oom_kills"] == 2
    monkeypatch.setattr(memory_size, "Path", lambda path: Path("/nowhere"))
    assert oom_kills() == 0


def test_a_device_s_peak_is_of_the_time_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = [300, 100]
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        memory_stats=lambda: {"num_ooms": 1},
        max_memory_allocated=lambda: peaks[0],
        reset_peak_memory_stats=lambda: peaks.pop(0),
    )
    monkeypatch.setattr(memory, "torch", SimpleNamespace(cuda=cuda))
    rank = RankMemory()
    assert [rank.metrics()["perf/memory/device_bytes"] for _ in range(2)] == [300, 100]
    assert not torch.cuda.is_initialized()


def test_of_several_ranks_the_largest_counts_and_other_metrics_are_left_alone() -> None:
    found = largest([{"perf/memory/a": 1.0, "train/loss": 9.0}, {"perf/memory/a": 3.0, "perf/memory/b": 2.0}])
    assert found == {"perf/memory/a": 3.0, "perf/memory/b": 2.0}


def test_the_object_store_s_peak_stays_and_a_ray_that_does_not_answer_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private import internal_api

    used, asked = [5, 9, 2], list[object]()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="a:1"))
    monkeypatch.setattr(internal_api, "get_state_from_address", asked.append)

    def reply(state: object, timeout_seconds: float) -> SimpleNamespace:
        if not used:
            raise RuntimeError("no answer")
        stats = SimpleNamespace(object_store_bytes_used=used.pop(0), spilled_bytes_total=4)
        return SimpleNamespace(store_stats=stats)

    monkeypatch.setattr(internal_api, "get_memory_info_reply", reply)
    store = StoreMemory()
    found = [store.metrics() for _ in range(5)]
    assert [one.get("perf/memory/store_bytes") for one in found] == [5, 9, 9, None, None]
    assert found[0]["perf/memory/spilled_bytes"] == 4


def test_every_figure_is_documented() -> None:
    keys = [*RankMemory().metrics(), "perf/memory/device_bytes", "perf/memory/device_ooms", "perf/memory/store_bytes"]
    assert not [key for key in keys if f"`{key}`" not in PAGE]

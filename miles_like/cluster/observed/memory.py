"""High-water marks of memory: of a rank's process and device, of Ray's object store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch

from miles_like.limits.memory_size import oom_kills, peak_host_bytes

_ANSWER_S = 5.0  # of the object stores of all nodes
_log = logging.getLogger(__name__)


class RankMemory:
    """Of the process of a rank, from its first look on."""

    def __init__(self) -> None:
        self._kills = oom_kills()

    def metrics(self) -> dict[str, float]:
        """Largest resident memory since the process began, processes that the kernel of the machine has ended for want
        of memory since this object was made; with a CUDA device the most that tensors had since the last call, and the
        allocations that failed since the process began."""
        found = {
            "perf/memory/host_bytes": peak_host_bytes(),
            "perf/memory/oom_kills": float(oom_kills() - self._kills),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            stats = torch.cuda.memory_stats()
            found |= {
                "perf/memory/device_bytes": float(torch.cuda.max_memory_allocated()),
                "perf/memory/device_ooms": float(stats.get("num_ooms", 0)),
            }
            torch.cuda.reset_peak_memory_stats()
        return found


def largest(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`perf/memory/...` of the rank that has the most of each."""
    keys = dict.fromkeys(key for report in reports for key in report if key.startswith("perf/memory/"))
    return {key: max(report[key] for report in reports if key in report) for key in keys}


class StoreMemory:
    """Of Ray's object stores, all nodes together."""

    def __init__(self) -> None:
        self._peak = 0.0
        self._answers = True
        self._state: Any = None  # the connection to Ray, once there is one

    def metrics(self) -> dict[str, float]:
        """The most bytes in use at any call so far, and those that were written to disk since Ray began; empty without
        Ray, or where it does not answer. Blocks for up to 5 s."""
        if not (self._answers and ray.is_initialized()):
            return {}
        try:
            from ray._private import internal_api  # which `ray memory` calls, too

            if self._state is None:
                self._state = internal_api.get_state_from_address(ray.get_runtime_context().gcs_address)  # type: ignore[no-untyped-call]
            reply = internal_api.get_memory_info_reply(self._state, timeout_seconds=_ANSWER_S)  # type: ignore[no-untyped-call]
            stats = reply.store_stats
        except Exception as e:  # gRPC's, of an interface that Ray does not promise: a figure is no reason to end a run
            self._answers = False
            _log.warning("the object store's memory is not known, and perf/memory/store_bytes is absent: %s", e)
            return {}
        self._peak = max(self._peak, float(stats.object_store_bytes_used))
        return {
            "perf/memory/store_bytes": self._peak,
            "perf/memory/spilled_bytes": float(stats.spilled_bytes_total),
        }

"""What goes wrong in the process of an embedded server in the middle of a publication.

The faults are planted in the server's own process, before it serves: a signal, an exception, a weight that stays old.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from miles_like.types import NamedTensor
from rollout.embedded.ranks.part import Part
from rollout.embedded.server.service import Service

SLOW_S = 4.0


def _out_of_memory() -> None:
    raise MemoryError("cannot allocate 1234 bytes")


ACTS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "slow": lambda: time.sleep(SLOW_S),
    "out of memory": _out_of_memory,
}


def plant(fault: Callable[[str | None], str | None]) -> None:
    """`fault` is asked in the middle of each update: with its version, at the second request of tensors, before a
    directory is read, or before differences that were prepared replace weights. It answers with a name of ACTS, or
    None."""
    update, load, load_delta = Service.update, Service.load, Service.load_delta

    def act(version: str | None) -> None:
        if (name := fault(version)) is not None:
            ACTS[name]()

    def updating(self: Service, tensors: Iterable[NamedTensor], *, flush_cache: bool, version: str | None) -> None:
        if self._session is not None and self._session.staged:
            act(self._session.begun_as)
        update(self, tensors, flush_cache=flush_cache, version=version)

    def loading(self: Service, checkpoint: Any, *, flush_cache: bool, version: str | None) -> None:
        act(version)
        load(self, checkpoint, flush_cache=flush_cache, version=version)

    def replacing(self: Service, path: Path, *, flush_cache: bool, version: str | None) -> None:
        act(version)
        load_delta(self, path, flush_cache=flush_cache, version=version)

    Service.update, Service.load, Service.load_delta = updating, loading, replacing  # type: ignore[method-assign]


def plant_once(name: str, at: int) -> None:
    """In the middle of the first publication of a version."""
    done = list[str]()

    def fault(version: str | None) -> str | None:
        if version != str(at) or done:
            return None
        done.append(name)
        return name

    plant(fault)


STALE = "lm_head.weight"


def plant_stale() -> None:
    """The server holds and hashes what it is sent, and computes with the first value of one weight for ever."""
    commit, first = Part.commit, dict[str, Any]()

    def committing(self: Part) -> None:
        assert self._next is not None
        first.setdefault(STALE, self.store[STALE])
        self._next = self._next._replace(weights=self.preparation.prepare(self._next.store.replaced(first)))
        commit(self)

    Part.commit = committing  # type: ignore[method-assign]

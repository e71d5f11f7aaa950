"""A rank of a server that is not the first: it does what rank 0 sends.

Operations arrive on a pipe, on which the rank waits without limit; an end of the pipe means that rank 0 has ended. What
a forward pass exchanges goes through `gloo.py`. A thread sends a beat to rank 0, which a stopped process does not.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.embedded.cache.kv_cache import KVCache
from rollout.embedded.model.exact_ops import operations
from rollout.embedded.model.slices import Slices
from rollout.embedded.model.weights import UpdateSession
from rollout.embedded.ranks.checksums import rank_checksums
from rollout.embedded.ranks.gloo import GlooExchange, RankLost
from rollout.embedded.ranks.packed import Packed, unpack
from rollout.embedded.ranks.part import Kept, Part, opened, trim_heap
from rollout.embedded.updates.slices import SliceReceiver

BEAT_S = 1.0  # between two beats, at most
_IN_PASSES = ("forward", "logits", "copy_pages")  # which rank 0 awaits in their exchanges


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a rank serves. It can be pickled."""

    path: Path
    slices: Slices
    kept: Kept
    shards: tuple[int, int] | None  # of exact operations; None: plain ones
    slots: int  # of the cache
    page: int


class SentTensor(NamedTuple):
    """A tensor on a pipe."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @classmethod
    def of(cls, name: str, t: Tensor) -> SentTensor:
        return cls(name, t.dtype, tuple(t.shape), t.detach().contiguous().view(-1).view(torch.uint8).numpy())

    def tensor(self) -> Tensor:
        """A tensor with separate storage."""
        return torch.from_numpy(self.data.copy()).view(self.dtype).view(self.shape)


class Follower:
    """The operations, one method each; `Crew` has what rank 0 sends for them."""

    def __init__(self, exchange: GlooExchange, receiver: SliceReceiver, launch: Launch) -> None:
        ops = operations(launch.shards)
        self._exchange, self._receiver = exchange, receiver
        self._part = Part(opened(launch.path), launch.slices, launch.kept, ops, exchange=exchange)
        self._cache = KVCache(
            launch.slices.arch,
            slots=launch.slots,
            page=launch.page,
            dtype=launch.kept.dtype,
            width=self._part.model.cache_width,
            routes=False,
            prefixes=False,
        )
        self._x = torch.zeros(0)  # hidden states of the last forward pass
        self._session: UpdateSession | None = None
        self._paired: Mapping[str, Any] = {}

    # ---- forward passes

    def forward(self, batch: Packed) -> None:
        self._x = self._part.model.forward(unpack(batch, self._cache.page), self._cache)

    def logits(self, rows: NDArray[np.int64] | tuple[int, int] | None) -> None:
        self._part.model.logits(
            self._x, slice(*rows) if isinstance(rows, tuple) else None if rows is None else torch.from_numpy(rows)
        )

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        self._cache.copy(sources, targets)

    # ---- weights

    def begin(self) -> None:
        self._session = UpdateSession(self._part.store)

    def stage(self, tensors: Sequence[SentTensor]) -> None:
        assert self._session is not None
        for t in tensors:
            self._session.staged[t.name] = t.tensor()

    def adopt_slices(self) -> None:
        assert self._session is not None
        self._session.take(self._receiver.take())

    def slice_hashes(self) -> dict[str, str]:
        return self._receiver.hashes(self._part.store.stored_tensor())

    def finish(self) -> list[str]:
        """Returns the names of the weights of which a part is held and was sent. Raises ValueError."""
        session, self._session = self._session, None
        assert session is not None
        self._paired = session.finish()
        return list(self._paired)

    def prepare(self, all_of_them: bool) -> None:
        paired, self._paired = self._paired, {}
        self._part.prepare(paired, all_of_them=all_of_them)

    def prepare_from(self, path: Path) -> None:
        self._part.prepare_from(opened(path))

    def commit(self) -> None:
        self._part.commit()

    def discard(self) -> None:
        self._session, self._paired = None, {}
        self._part.discard()

    def checksums(self) -> dict[str, str]:
        return rank_checksums(self._part.store, self._exchange)

    # ---- memory

    def release(self, cache: bool, weights: bool) -> None:
        if cache:
            self._cache.free_memory()
        if weights:
            self._part.free()
        trim_heap()

    def resume(self, cache: bool) -> None:
        if cache:
            self._cache.allocate_memory()

    def held(self) -> tuple[int, int]:
        """Bytes of the cache, and of the weights."""
        return self._cache.nbytes, self._part.nbytes


@torch.inference_mode()
def _serve(line: Connection, receiver: SliceReceiver, rank: int, size: int, limit_s: float) -> None:
    meeting = line.recv()
    exchange = GlooExchange(meeting, rank, size, limit_s=limit_s)
    line.send(("done", None))
    follower: Follower | None = None
    while True:
        name, arguments = line.recv()
        try:
            if name == "build":
                follower, result = None, None  # frees the last one first
                follower = Follower(exchange, receiver, *arguments)
            else:
                result = getattr(follower, name)(*arguments)
        except ValueError as e:
            if name in _IN_PASSES:
                raise
            line.send(("refused", str(e)))
            continue
        if name not in _IN_PASSES:
            line.send(("done", result))


def _serve_beside(side: Connection, receiver: SliceReceiver) -> None:
    """Does what waits for other processes, while forward passes run."""
    try:
        while True:
            name, arguments = side.recv()
            try:
                side.send(("done", getattr(receiver, name)(*arguments)))
            except ValueError as e:
                side.send(("refused", str(e)))
            except RuntimeError as e:  # rank 0 waits for an answer
                side.send(("refused", f"{type(e).__name__}: {e}"))
    except (EOFError, OSError):
        return  # rank 0 has ended


def follow(
    line: Connection,
    side: Connection,
    beats: Connection,
    rank: int,
    size: int,
    threads: int,
    limit_s: float,
    foreign: Sequence[Connection],
) -> None:
    """The main function of rank `rank`. foreign: ends of pipes that belong to rank 0, where this process is a fork of
    it. Returns when rank 0 has ended."""
    for signal_number in (signal.SIGTERM, signal.SIGINT):  # sent to the whole group; rank 0 ends the others
        signal.signal(signal_number, signal.SIG_IGN)
    for end in foreign:
        end.close()
    torch.set_num_threads(threads)
    threading.Thread(target=_beat, args=(beats, min(BEAT_S, limit_s / 4)), daemon=True).start()
    receiver = SliceReceiver()
    threading.Thread(target=_serve_beside, args=(side, receiver), daemon=True).start()
    try:
        _serve(line, receiver, rank, size, limit_s)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except RankLost:
        # another rank has ended, or waited too long; which, rank 0 knows, and ends this one too
        try:
            while True:
                line.recv()
        except (EOFError, OSError):
            sys.exit(1)


def _beat(beats: Connection, every_s: float) -> None:
    try:
        while True:
            beats.send_bytes(b".")
            time.sleep(every_s)
    except OSError:
        return  # rank 0 has ended

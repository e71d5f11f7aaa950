"""The other ranks of a server, as rank 0 sees them: started, watched, and given their work.

Of all ranks only rank 0 has the HTTP server, the scheduler, the sampler, and the routes of tokens. It sends each
operation to the others on a pipe, does its own part, and for all but forward passes waits for their answers.
"""

from __future__ import annotations

import atexit
import multiprocessing
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext, ForkContext
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from rollout.embedded.cache.kv_cache import KVCache
from rollout.embedded.model.batch import ForwardBatch
from rollout.embedded.model.model import Model
from rollout.embedded.ranks.follower import follow
from rollout.embedded.ranks.gloo import GlooExchange, RankLost
from rollout.embedded.ranks.packed import pack

LIMIT_S = 120.0  # without a beat, or in an exchange, after which a rank is given up
_POLL_S = 0.5
_EXPLAIN_S = 5.0  # an error of an exchange is seen before the end of the process that caused it
_STOP_S = 5.0

T = TypeVar("T")


class Crew:
    """Ranks 1 to `size` - 1 of a server, or of several in turn. If one ends or stops, all are killed, `failure` names
    it, and `on_failure` is called."""

    def __init__(
        self, size: int, *, threads: int = 1, limit_s: float = LIMIT_S, context: BaseContext | None = None
    ) -> None:
        """Starts the processes. context: None forks this process, which must have no other thread yet."""
        context = context or multiprocessing.get_context("fork")
        self.size, self.limit_s = size, limit_s
        self.failure = ""
        self.on_failure: Callable[[str], None] = lambda sentence: None
        self._failed, self._closing, self._lock = threading.Event(), False, threading.Lock()
        self._exchange: GlooExchange | None = None
        self._lines: list[Connection] = []
        self._sides: list[Connection] = []  # for what waits for other processes, beside forward passes
        self._beats: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(1, size):
            line, their_line = context.Pipe()
            side, their_side = context.Pipe()
            beats, their_beats = context.Pipe(duplex=False)
            self._lines.append(line)
            self._sides.append(side)
            self._beats.append(beats)
            foreign = [*self._lines, *self._sides, *self._beats] if isinstance(context, ForkContext) else []
            process = context.Process(  # type: ignore[attr-defined]
                target=follow,
                args=(their_line, their_side, their_beats, rank, size, threads, limit_s, foreign),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            self._processes.append(process)
            for end in (their_line, their_side, their_beats):
                end.close()
        if size == 1:
            return
        threading.Thread(target=self._watch, daemon=True, name="ranks").start()
        atexit.register(self.stop)  # before multiprocessing's own, which would wait for them

    def meet(self) -> GlooExchange:
        """The exchange of all ranks. Raises RankLost."""
        if self._exchange is not None:
            return self._exchange
        directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        try:
            for rank in range(1, self.size):
                self._send(rank, directory / "meeting")
            exchange = GlooExchange(directory / "meeting", 0, self.size, limit_s=self.limit_s)
            for rank in range(1, self.size):
                self._answer(rank)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        exchange.explain = self.explain
        self._exchange = exchange
        return exchange

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1, 2, ..."""
        return [p.pid for p in self._processes]

    # ---- operations

    def post(self, operation: str, *arguments: object) -> None:
        """Sends an operation of a forward pass, which is not answered, to all ranks. Raises RankLost."""
        for rank in range(1, self.size):
            self._send(rank, (operation, arguments))

    def together(
        self,
        own: Callable[[], T],
        operation: str,
        *arguments: object,
        each: Sequence[tuple[object, ...]] | None = None,
    ) -> list[T]:
        """The results of `own` here and of `operation` on the other ranks, in the order of ranks. each: arguments of
        ranks 1, 2, ... where they differ. Raises the first ValueError when all have answered, or RankLost."""
        return self._joined(self._lines, own, operation, [arguments] * (self.size - 1) if each is None else each)

    def beside(self, own: Callable[[], T], operation: str, each: Sequence[tuple[object, ...]]) -> list[T]:
        """As `together` of methods of the ranks' `SliceReceiver`, which wait for other processes: forward passes run
        meanwhile. One thread at a time."""
        return self._joined(self._sides, own, operation, each)

    def _joined(
        self, lines: Sequence[Connection], own: Callable[[], T], operation: str, each: Sequence[tuple[object, ...]]
    ) -> list[T]:
        for rank, arguments in enumerate(each, 1):
            self._send(rank, (operation, arguments), lines)
        refused: list[ValueError] = []
        results: list[T] = []
        try:
            results.append(own())
        except ValueError as e:
            refused.append(e)
        finally:  # an answer that nothing reads would be taken for that of a later operation
            answers = [self._answer(rank, lines) for rank in range(1, self.size)]
        for rank, (kind, value) in enumerate(answers, 1):
            if kind == "refused":
                refused.append(ValueError(f"rank {rank}: {value}"))
            else:
                results.append(value)
        if refused:
            raise refused[0]
        return results

    def _send(self, rank: int, message: object, lines: Sequence[Connection] | None = None) -> None:
        try:
            (lines or self._lines)[rank - 1].send(message)
        except OSError as e:
            raise RankLost(self.explain(str(e))) from e

    def _answer(self, rank: int, lines: Sequence[Connection] | None = None) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = (lines or self._lines)[rank - 1].recv()
        except (EOFError, OSError) as e:
            raise RankLost(self.explain(f"rank {rank} closed its connection")) from e
        return answer

    # ---- watching

    def explain(self, error: str) -> str:
        """The sentence that names the rank to blame for an error of an exchange. The server ends with it."""
        if not self._failed.wait(_EXPLAIN_S):
            self._fail(
                f"the {self.size} ranks of this server lost their connection ({error}): the server ends; see its log"
            )
        return self.failure

    def _watch(self) -> None:
        last = dict.fromkeys(range(1, self.size), time.monotonic())
        beats = dict(zip(self._beats, range(1, self.size), strict=True))
        while not self._closing and not self.failure:
            found = wait([*beats, *(p.sentinel for p in self._processes)], min(_POLL_S, self.limit_s / 4))
            for line in [b for b in beats if b in found]:
                try:
                    while line.poll():
                        line.recv_bytes()
                except (EOFError, OSError):  # it has ended: its sentinel follows
                    del beats[line]
                    continue
                last[beats[line]] = time.monotonic()
            for rank, process in enumerate(self._processes, 1):
                if not process.is_alive():
                    self._fail(f"{self._name(rank)} ended with {_how(process.exitcode)}: the server ends; see its log")
                elif time.monotonic() - last[rank] > self.limit_s:
                    self._fail(
                        f"{self._name(rank)} has not answered for {self.limit_s:g} s (process {process.pid} is "
                        "stopped, or starved): the server ends; raise --rank-timeout if the rank is only slow"
                    )

    def _name(self, rank: int) -> str:
        return f"rank {rank} of this server's {self.size} ranks"

    def _fail(self, sentence: str) -> None:
        with self._lock:
            if self.failure or self._closing:
                return
            self.failure = sentence
        self._kill()
        self._failed.set()
        self.on_failure(sentence)

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()

    def stop(self) -> None:
        """Ends the processes."""
        atexit.unregister(self.stop)
        with self._lock:
            self._closing = True
        for line in (*self._lines, *self._sides):
            line.close()  # on which they wait
        until = time.monotonic() + _STOP_S
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
        self._kill()
        for process in self._processes:
            process.join()


def _how(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


class LedModel(Model):
    """The model of rank 0, which the other ranks follow."""

    def __init__(self, *arguments: Any, crew: Crew, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._crew = crew

    def forward(self, batch: ForwardBatch, cache: KVCache, states: list[Tensor] | None = None) -> Tensor:
        self._crew.post("forward", pack(batch, cache.page))
        return super().forward(batch, cache, states)

    def logits(self, x: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        sent = (rows.start, rows.stop) if isinstance(rows, slice) else rows.numpy() if rows is not None else None
        self._crew.post("logits", sent)
        return super().logits(x, rows)

    def copy_pages(self, cache: KVCache, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._crew.post("copy_pages", list(sources), list(targets))
        super().copy_pages(cache, sources, targets)

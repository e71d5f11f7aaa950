"""Weights gathered for the sources of a publication, beside their work.

A source encodes and sends in one thread, where it waits for servers and for its turn. The thread that calls the trainer
gathers: on the source, and on the ranks that hold shards of the source's tensors. A source asks for one chunk after the
other, each while it works on the one before. The requests of all sources of a group stand in one list, which each rank
of the group follows: collectives are opened in one order on all of them, and a rank that waits has none open.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from queue import SimpleQueue

import torch

from miles_like.rank_protocols import Board, Signals, WeightSources
from miles_like.types import NamedTensor, PublishReport
from rollout.publish.sources.part import Part

_PIECE_S = 60.0  # of the wait for a request, after which sources that do not answer are looked up
_END = -1  # in place of a chunk: the source asks for no more

Work = Callable[[Part], PublishReport]


class Gathering:
    """Of one rank, for all its publications. All ranks begin a publication together, and each ends when the sources
    that it helps ask for no more. No time limit: the driver limits the call."""

    def __init__(self, signals: Signals, rank: int) -> None:
        self._signals, self._rank = signals, rank
        self._publications = 0
        self._left: list[str] = []  # names of texts of the last publication

    def publish(self, sources: WeightSources, work: Work, *, version: int) -> PublishReport:
        """`work` is called in another thread, where this rank is a source. Raises what it raises, else what gathering
        raises."""
        began = time.perf_counter()
        self._publications += 1
        self._signals.meet()
        while self._left:
            self._requests.remove(self._left.pop())
        if self._rank not in sources.ranks:
            self._serve(sources, None)
            return PublishReport(version=version, bytes=0, seconds=time.perf_counter() - began, pause_seconds=0.0)
        number = sources.ranks.index(self._rank)
        asking = _Asking(number, sources.chunks(number), self._ask(sources.group, number))
        part = Part(
            number=number,
            sources=sources,
            weights=asking.weights(),
            publication=self._publications,
            board=lambda: self._signals.board("sources"),
            abandon=self._abandon,
        )
        with ThreadPoolExecutor(1, "source", _on_this_device()) as threads:
            report = threads.submit(asking.around, work, part)
            try:
                self._serve(sources, asking)
            except RuntimeError as e:  # of a collective
                asking.chunks.put(e)
                report.result()
                raise
            return report.result()

    @cached_property
    def _requests(self) -> Board:
        return self._signals.board("gather")

    @cached_property
    def _writer(self) -> Board:
        """Of the other thread."""
        return self._signals.board("gather")

    def _name(self, *words: object) -> str:
        return " ".join(map(str, (self._publications, *words)))

    def _ask(self, group: int, source: int) -> Callable[[int], None]:
        count = self._name(group, "count")
        self._left.append(count)

        def ask(chunk: int) -> None:
            name = self._name(group, self._writer.number(count))
            self._left.append(name)
            self._writer.put(name, f"{source} {chunk}")

        return ask

    def _abandon(self, sources: Sequence[int]) -> None:
        self._left.append(name := self._name("gone"))
        self._writer.put(name, " ".join(map(str, sources)))

    def _serve(self, sources: WeightSources, own: _Asking | None) -> None:
        """Follow the list of requests until every source that this rank helps has ended."""
        left, number = set(sources.helps), 1
        while left:
            request = self._requests.read(self._name(sources.group, number), _PIECE_S)
            if request is None:
                left -= self._gone()
                continue
            number += 1
            source, chunk = map(int, request.split())
            if chunk == _END:
                left.discard(source)
            elif source in sources.helps:
                tensors = sources.gather(source, chunk)
                if own is not None and source == own.number:
                    own.chunks.put(deque(tensors))
                del tensors

    def _gone(self) -> set[int]:
        text = self._requests.read(self._name("gone"), 0)
        return set() if text is None else set(map(int, text.split()))


class _Asking:
    """A source's side: the requests of its thread."""

    def __init__(self, number: int, count: int, ask: Callable[[int], None]) -> None:
        """count: of its chunks."""
        self.number, self._count, self._ask = number, count, ask
        self.chunks: SimpleQueue[deque[NamedTensor] | RuntimeError] = SimpleQueue()  # as asked for, gathered

    def around(self, work: Work, part: Part) -> PublishReport:
        try:
            return work(part)
        finally:  # also where it has not drained the weights: no rank gathers the rest
            self._ask(_END)

    def weights(self) -> Iterator[NamedTensor]:
        """Raises RuntimeError where the ranks that gather together have lost one of them."""
        for chunk in range(min(1, self._count)):
            self._ask(chunk)
        for chunk in range(self._count):
            tensors = self.chunks.get()
            if isinstance(tensors, RuntimeError):
                raise tensors
            if chunk + 1 < self._count:
                self._ask(chunk + 1)
            while tensors:
                yield tensors.popleft()


def _on_this_device() -> Callable[[], None] | None:
    """For a thread: the device of this one."""
    if not torch.cuda.is_initialized():
        return None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)

"""Pace a collective stream of weights by the rank that sends them, or by all where each writes a part.

Producing a tensor is a collective of all trainer ranks. Without pacing, all ranks but the sender drain the stream at
once and then wait inside the next collective while the sender waits for servers or a disk; a publication longer than
the collectives' time limit would then be aborted. Here the stream is gathered in chunks. Before each chunk the sender
sends a signal when it needs the chunk, and the other ranks wait for that signal with no collective open. Where every
rank works on the stream, all wait for the last one before each chunk, and each gathers the chunk before it works on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count

from miles_like.rank_protocols import Signals
from miles_like.types import NamedTensor

CHUNK_BYTES = 256 << 20


class Pacer:
    """Paces the streams of one rank. sends: whether this rank is the sender, in every stream.

    chunk_bytes: a chunk ends with the tensor that fills it. Names, shapes and dtypes are equal on all ranks, hence so
    are the chunks. The sender holds a whole chunk: gathered when it is asked for the chunk's first tensor, so that no
    collective is left open while it sends.
    """

    def __init__(self, signals: Signals, *, sends: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._signals, self._sends, self._chunk_bytes = signals, sends, chunk_bytes
        self._streams = 0  # so far, on every rank
        self._sent: list[str] = []  # signals of the last stream

    def paced(self, weights: Iterable[NamedTensor], *, together: bool = False) -> Iterator[NamedTensor]:
        """`weights`, paced; together: every rank works on them. Raises RuntimeError on the other ranks when the process
        of the sender, or with `together` of any rank, ends.

        Every rank has drained a stream before any rank begins the next one.
        """
        self._streams += 1
        while self._sent:
            self._signals.forget(self._sent.pop())
        stream = iter(weights)
        for number in count():
            name = f"stream {self._streams} chunk {number}"
            if together:
                self._signals.meet()
                chunk: Iterable[NamedTensor] = _emptying(deque(self._chunk(stream)))
            elif self._sends:
                self._signals.send(name)
                self._sent.append(name)
                chunk = _emptying(deque(self._chunk(stream)))
            else:
                self._signals.wait_for(name)
                chunk = self._chunk(stream)
            empty = True
            for item in chunk:
                empty = False
                yield item
            if empty:
                return

    def _chunk(self, stream: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        """The next tensors of the stream, up to the one that fills the chunk; none at its end."""
        size = 0
        while size < self._chunk_bytes and (item := next(stream, None)) is not None:
            size += item.tensor.nbytes
            yield item


def _emptying(items: deque[NamedTensor]) -> Iterator[NamedTensor]:
    """The items in order, without keeping a reference to those already yielded."""
    while items:
        yield items.popleft()

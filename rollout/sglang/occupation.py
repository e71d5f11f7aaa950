"""Which parts of a server's memory are released, and which requests it can therefore be sent. No I/O.

A stock SGLang server does not reject these requests, it ends: a release while a request runs or waits (AssertionError),
a resume of what was not released (KeyError), a generation in freed memory. `Occupation` rejects each of them before it
is sent. It is shared by all clients of a server in one process and counts the requests that are in flight in them.

    all parts held, weights complete  --release-->  some parts released  --resume-->  all held, weights undefined
              ^------------------------------- published ------------------------------------------'

The content of weights that were released is undefined until a complete publication has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rollout.wire.bodies import MemoryTag


class Occupation:
    """The memory of one server as it is after the requests that were sent."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.released: frozenset[MemoryTag] = frozenset()
        self.complete = True  # the weights are those of the launch or of a whole publication
        self.in_flight = 0  # generations and scorings

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Counts a request that samples or scores. Raises RuntimeError where a part is released or the weights are
        undefined."""
        self.require_parts("generate")
        if not self.complete:
            raise RuntimeError(
                f"server {self.url} cannot generate: its weights were released, and not published again: publish first"
            )
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def require_parts(self, what: str, parts: Iterable[MemoryTag] = tuple(MemoryTag)) -> None:
        """Raises RuntimeError for the request `what` where one of `parts` is released."""
        if missing := self.released & frozenset(parts):
            raise RuntimeError(
                f"server {self.url} cannot {what}: its {_names(missing)} memory is released: resume it first"
            )

    @contextmanager
    def releasing(self, tags: Iterable[MemoryTag]) -> Iterator[None]:
        """Releases `tags`, so that the body is not overtaken by a generation; an exception of the body takes the
        release back. Raises RuntimeError, and changes nothing, for no tag, while requests are in flight, and for a part
        that is released already."""
        wanted = self._wanted(tags, "release")
        if self.in_flight:
            raise RuntimeError(
                f"server {self.url} cannot release {_names(wanted)}: {self.in_flight} requests are in flight, and "
                "a stock server would crash: wait for them first"
            )
        if again := wanted & self.released:
            raise RuntimeError(f"server {self.url} cannot release {_names(again)}: it was already released")
        before = self.released, self.complete
        self.released |= wanted
        self.complete = self.complete and MemoryTag.WEIGHTS not in wanted
        try:
            yield
        except BaseException:
            self.released, self.complete = before
            raise

    def resume(self, tags: Iterable[MemoryTag]) -> None:
        """Raises RuntimeError, and changes nothing, for no tag and for a part that is not released."""
        wanted = self._wanted(tags, "resume")
        if held := wanted - self.released:
            raise RuntimeError(
                f"server {self.url} cannot resume {_names(held)}: it was not released, and a stock server would crash"
            )
        self.released -= wanted

    def publishing(self) -> None:
        """Raises RuntimeError before a publication to a server whose weights are released."""
        self.require_parts("receive weights", [MemoryTag.WEIGHTS])

    def published(self) -> None:
        """Every weight was replaced. Raises as `publishing`."""
        self.publishing()
        self.complete = True

    def _wanted(self, tags: Iterable[MemoryTag], what: str) -> frozenset[MemoryTag]:
        wanted = frozenset(tags)
        if not wanted:  # a server takes an empty list for all tags
            raise RuntimeError(f"server {self.url} cannot {what} 0 parts: pass at least one of {_names(MemoryTag)}")
        return wanted


def _names(tags: Iterable[MemoryTag]) -> str:
    chosen = set(tags)
    return ", ".join(tag.value for tag in MemoryTag if tag in chosen)

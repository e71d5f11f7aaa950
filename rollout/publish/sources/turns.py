"""Messages between the sources of a publication, through the board of the trainer's ranks.

Source 0 leads: it alone pauses servers, begins and ends their update, and decides whether it succeeded. A source sends
one bucket in its turn, which then goes to the next source that has another one, round and round: while one sends, the
others encode. The order of buckets therefore depends on their numbers alone, and the last one carries the version.

A wait ends with the message, or once no turn has been passed on for the limit of one: then the source that has it is
named. None of it happens inside a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any

import orjson

from miles_like.rank_protocols import Board
from rollout.sglang.http_replies import RolloutError

_PIECE_S = 60.0  # of a wait, after which it looks whether turns go on


class Kind(StrEnum):
    """Of a message. To the sources:"""

    GO = "go"  # publish to these servers
    JOIN = "join"  # make the group with them
    STOP = "stop"  # the publication has failed
    OUTCOME = "outcome"  # it has ended
    # to the leading one:
    JOINED = "joined"
    READY = "ready"  # encoded ahead
    DONE = "done"  # all buckets are loaded
    FAILED = "failed"
    STOPPED = "stopped"  # as the leading one has asked


Message = Mapping[str, Any]


class Stopped(RolloutError):
    """Another source has failed."""


class Silent(RolloutError):
    """Sources do not answer."""

    def __init__(self, text: str, sources: Collection[int]) -> None:
        super().__init__(text)
        self.sources = sources


class Turns:
    """One source's side, for all its publications. Methods raise RuntimeError when trainer rank 0 has ended."""

    def __init__(self, number: int, ranks: Sequence[int], board: Callable[[], Board], *, limit_s: float) -> None:
        """ranks: of the sources. limit_s: for one bucket."""
        self.number, self.ranks, self._limit_s = number, ranks, limit_s
        self.others = tuple(i for i in range(len(ranks)) if i != number)
        self._control, self._turns = board(), board()  # of the thread that encodes, and the one that sends
        self._publication = 0
        self._read = {"control": 0, "turn": 0}
        self._left: list[str] = []

    def begin(self, publication: int) -> None:
        while self._left:
            self._control.remove(self._left.pop())
        self._publication, self._read = publication, dict.fromkeys(self._read, 0)
        self._left += [self._name(box, self.number, "count") for box in self._read]
        self._left += [] if self.number else [self._name("holder"), self._name("turns")]

    # ---- messages to a source, in its thread that encodes

    def post(self, to: int, kind: Kind, **fields: Any) -> None:
        self._post(self._control, "control", to, {"kind": kind, "source": self.number, **fields})

    def hear(self, waited_for: Collection[int]) -> Message:
        """The next message. Raises Silent naming sources of `waited_for`, which have not answered, where a turn takes
        too long: the one whose turn it is if there is one."""
        return self._take(self._control, "control", waited_for)

    def stop(self) -> None:
        """End the publication at every source."""
        for other in self.others:
            self.post(other, Kind.STOP)
        self.stop_turns(range(len(self.ranks)))

    def stop_turns(self, sources: Collection[int]) -> None:
        """Make waits for a turn at these sources raise Stopped."""
        for source in sources:
            self._post(self._control, "turn", source, {"kind": Kind.STOP})

    # ---- turns

    def open(self, active: Sequence[int]) -> None:
        """Give the first turn. active: the sources that have buckets, in their order."""
        self._give(self._control, active[0] if active else None, active)

    def take(self) -> list[int]:
        """Wait for this source's turn; returns the sources that have buckets left, this one included. Raises Stopped,
        and Silent."""
        message = self._take(self._turns, "turn", ())
        if message["kind"] == Kind.STOP:
            raise Stopped("another sending rank failed; see its log")
        active: list[int] = message["active"]
        return active

    def pass_on(self, active: Sequence[int]) -> None:
        """active: the sources that still have buckets."""
        later = [i for i in active if i > self.number]
        self._give(self._turns, next(iter(later or active), None), active)

    def _give(self, board: Board, to: int | None, active: Sequence[int]) -> None:
        board.put(self._name("holder"), f"{board.number(self._name('turns'))} {'' if to is None else to}")
        if to is not None:
            self._post(board, "turn", to, {"kind": "turn", "active": list(active)})

    # ---- texts

    def _post(self, board: Board, box: str, to: int, message: Message) -> None:
        number = board.number(self._name(box, to, "count"))
        board.put(self._name(box, to, number), orjson.dumps(message).decode())

    def _take(self, board: Board, box: str, waited_for: Collection[int]) -> Message:
        name, since, seen = self._name(box, self.number, self._read[box] + 1), time.monotonic(), ""
        while (text := board.read(name, min(_PIECE_S, self._limit_s))) is None:
            if (holder := board.read(self._name("holder"), 0) or "") != seen:
                since, seen = time.monotonic(), holder
            elif time.monotonic() - since > self._limit_s:
                raise self._silent(holder, waited_for)
        board.remove(name)
        self._read[box] += 1
        message: Message = orjson.loads(text)
        return message

    def _silent(self, holder: str, waited_for: Collection[int]) -> Silent:
        its_turn = holder.partition(" ")[2]
        sources = [int(its_turn)] if its_turn else sorted(waited_for) or [0]
        ranks = ", ".join(str(self.ranks[i]) for i in sources[:8]) + (", ..." if len(sources) > 8 else "")
        return Silent(
            f"trainer rank {ranks} has sent no bucket and no message for {self._limit_s:g} s "
            "(rollout.request_timeout_s and publish.parts_timeout_s): its process ended or hangs; see its log",
            sources,
        )

    def _name(self, *words: object) -> str:
        return " ".join(map(str, (self._publication, *words)))

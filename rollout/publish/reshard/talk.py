"""Messages between trainer ranks in a publication, on a board: from rank 0 to all others, and from each to rank 0.

A rank that waits has no collective open, and no limit of a process group runs.
"""

from __future__ import annotations

from typing import Any

import orjson

from miles_like.rank_protocols import Signals
from rollout.wire.replies import Json

_LONG_S = 3600.0  # of one wait at the board


class Talk:
    """The messages of one publication on rank `rank` of `ranks`. number: of the publication, equal on all ranks."""

    def __init__(self, signals: Signals, *, number: int, rank: int, ranks: int) -> None:
        self._board, self._number, self._rank, self._ranks = signals.board("shards"), number, rank, ranks
        self._said = 0
        self._heard = [0] * ranks  # messages of each rank
        self.stopped = False

    def say(self, **message: Any) -> None:
        """Send a message: rank 0 to all others, any other rank to rank 0."""
        self._board.put(self._name(self._rank, self._said), orjson.dumps(message).decode())
        self._said += 1

    def say_to(self, rank: int, **message: Any) -> None:
        """On rank 0: send a message to one rank, where `hear_own` returns it."""
        self._board.put(self._own_name(rank), orjson.dumps(message).decode())

    def hear_own(self) -> Json:
        """The message that rank 0 sent to this rank alone, before a message to all that refers to it."""
        found: Json = orjson.loads(self._board.read(self._own_name(self._rank), 0.0) or "")
        self._board.remove(self._own_name(self._rank))
        return found

    def stop(self) -> None:
        """On rank 0: end the part of the other ranks."""
        if not self.stopped:
            self.stopped = True
            self.say(stop=True)

    def hear(self, rank: int = 0, *, limit_s: float | None = None) -> Json | None:
        """The next message of a rank; None: none came within the limit. Raises RuntimeError when rank 0 has ended."""
        name = self._name(rank, self._heard[rank])
        text = self._board.read(name, _LONG_S if limit_s is None else limit_s)
        while text is None:
            if limit_s is not None:
                return None
            text = self._board.read(name, _LONG_S)
        self._heard[rank] += 1
        found: Json = orjson.loads(text)
        return found

    def forget(self) -> None:
        """On rank 0: delete the messages, once the other ranks have sent their last one and so have read all."""
        for rank in range(self._ranks):
            for i in range(self._said if rank == 0 else self._heard[rank]):
                self._board.remove(self._name(rank, i))

    def _own_name(self, rank: int) -> str:
        return f"publication {self._number}, to rank {rank}"

    def _name(self, rank: int, i: int) -> str:
        return f"publication {self._number}, rank {rank}, {i}"

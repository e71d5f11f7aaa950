"""The process group of all trainer ranks and all ranks of all servers: a trainer rank's part of it.

Messages go from rank to rank. No rank waits for one that it gets nothing from, and none is in a collective.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor
from torch.distributed import ProcessGroup, TCPStore, Work  # type: ignore[attr-defined]

from rollout.publish.group import first_line
from rollout.sglang.http_replies import RolloutError
from rollout.wire.groups import join_group, leave_group


class GroupFailed(RolloutError):
    """Another member has ended, or does not answer in time."""


class Membership:
    """Trainer rank `rank` of a group of `size`. timeout_s: of the join, and of each message."""

    def __init__(self, store: TCPStore, *, name: str, rank: int, size: int, timeout_s: float) -> None:
        """Returns once all members have joined. Raises GroupFailed."""
        self.name, self.size = name, size
        self._sent: list[Work] = []  # the messages of the last piece
        try:
            self._members: ProcessGroup | None = join_group(
                store, name=name, rank=rank, size=size, backend="gloo", timeout_s=timeout_s
            )
        except (RuntimeError, ValueError) as e:
            raise GroupFailed(
                f"the process group for weights was not formed within {timeout_s:g} s "
                f"(rollout.request_timeout_s): {first_line(e)}"
            ) from e

    @classmethod
    def of_another(cls, address: str, port: int, *, name: str, rank: int, size: int, timeout_s: float) -> Membership:
        """Join as another rank than 0, which serves the store. Raises GroupFailed."""
        limit = timedelta(seconds=timeout_s)
        try:
            store = TCPStore(address, port, None, False, limit, False)
        except RuntimeError as e:
            raise GroupFailed(
                f"the store of the process group at {address} port {port} cannot be reached: {first_line(e)}"
            ) from e
        return cls(store, name=name, rank=rank, size=size, timeout_s=timeout_s)

    def send(self, messages: Sequence[tuple[int, Tensor]]) -> None:
        """Begins to send; the tensors must stay as they are until `wait`. Raises GroupFailed."""
        assert self._members is not None, "the group was left"
        try:
            self._sent = [self._members.send([message], rank, 0) for rank, message in messages]
        except RuntimeError as e:
            raise GroupFailed(f"the process group for weights failed: {first_line(e)}") from e

    def wait(self) -> None:
        """Wait until the messages have arrived. Raises GroupFailed."""
        try:
            for work in self._sent:
                work.wait()
        except RuntimeError as e:
            raise GroupFailed(f"the process group for weights failed: {first_line(e)}") from e
        self._sent = []

    def leave(self) -> None:
        """Close the connections, so that members that wait for this rank stop to. In a thread where messages are
        under way: they end, or reach their time limit."""
        members, self._members = self._members, None
        if members is None:
            return
        if self._sent:
            threading.Thread(target=_leave, args=(members, self._sent), name="leave-group", daemon=True).start()
        else:
            leave_group(members)
        self._sent = []


def _leave(members: ProcessGroup, sent: Sequence[Work]) -> None:
    for work in sent:
        with contextlib.suppress(RuntimeError):
            work.wait()
    leave_group(members)

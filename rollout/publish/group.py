"""Buckets through a process group of the sending rank and all ranks of all servers, as stock SGLang 0.5.23 has it.

The sender is rank 0, the ranks of server i follow those of server i - 1. A request to every server announces a bucket,
which all receive in one broadcast. Of the trainer's ranks only the sender is a member, and it is in no collective of
the trainer while it waits for servers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from urllib.parse import urlsplit

from torch import Tensor
from torch.distributed import ProcessGroup, TCPStore, Work  # type: ignore[attr-defined]

from miles_like.types import NamedTensor
from rollout.publish.buffers import BUCKETS, Buffer, Pool
from rollout.publish.publication import PublishTarget
from rollout.publish.servers import ServerSet
from rollout.publish.transports import Send
from rollout.server_key import ServerKey
from rollout.server_url import on_loopback
from rollout.sglang.http_replies import NoAnswer, RolloutError
from rollout.sglang.ports import free_port
from rollout.wire import endpoints
from rollout.wire.control import DestroyGroup, InitGroup, UpdateFromDistributed
from rollout.wire.flat import FLATTENED
from rollout.wire.groups import join_group, leave_group

_log = logging.getLogger(__name__)
_LEAVE_S = 10.0  # limit on the time that a server takes to leave a group
_CONNECT_S = 5.0  # after which every server that was asked to join has connected to the store
_PORTS = 16  # tries to bind one
# refusals of a server whose cause is another member of the group
_CONSEQUENCES = ("Failed to receive weights", "Failed to initialize custom process group")


class _Membership:
    """This rank's part of one group."""

    def __init__(self, name: str, store: TCPStore, members: ProcessGroup) -> None:
        """store: it serves the group as long as the group exists."""
        self.name = name
        self._store, self._members = store, members
        self._work: Work | None = None  # the last broadcast
        self._leaving = threading.Lock()  # taken once

    def broadcast(self, bucket: Tensor) -> Work:
        self._work = self._members.broadcast(bucket, 0)
        return self._work

    def leave(self) -> None:
        """Close the connections to the servers, whose broadcasts then fail. In a thread, since it takes until the last
        broadcast has ended or reached its time limit."""
        if self._leaving.acquire(blocking=False):
            threading.Thread(target=self._leave, name="leave-group", daemon=True).start()

    def _leave(self) -> None:
        if self._work is not None:
            with contextlib.suppress(RuntimeError):
                self._work.wait()
        leave_group(self._members)
        del self._members, self._store


class _Answers:
    """The servers' answers to a request of a group, as they come.

    At the first failure this rank leaves the group, and from then on every server that answers is asked to: the others
    may wait for a broadcast that it was to pass on. A server that does not answer is not asked: it would not answer
    that request either.
    """

    def __init__(self, name: str, key: ServerKey | None, give_up: Callable[[], None]) -> None:
        self._name, self._key, self._give_up = name, key, give_up
        self._lock = threading.Lock()
        self._answered: list[str] = []
        self._errors: list[RolloutError] = []

    def __call__(self, url: str, error: RolloutError | None) -> None:
        with self._lock:
            answered = [] if isinstance(error, NoAnswer) else [url]
            self._answered += answered
            self._errors += [] if error is None else [error]
            failed = len(self._errors)
            first = failed == 1 and error is not None
            leaving = self._answered[:] if first else answered if failed else []
        if first:
            self._give_up()
        tell_to_leave(leaving, self._name, self._key)

    def result_of(self, asked: Future[None]) -> None:
        """Wait for all answers. Raises RolloutError with the failures, without those that follow from others: a group
        fails as a whole, also where servers that fail are left out of a publication."""
        with contextlib.suppress(RolloutError):
            asked.result()
        if self._errors:
            texts = [str(e) for e in self._errors]
            causes = [text for text in texts if not any(words in text for words in _CONSEQUENCES)]
            raise RolloutError("; ".join(causes or texts))


def tell_to_leave(urls: Collection[str], name: str, key: ServerKey | None) -> None:
    """Ask servers to leave the group, whether or not they are members. Returns after 10 s at most."""
    if urls:
        servers = ServerSet(tuple(urls), _LEAVE_S, key)
        with contextlib.suppress(RolloutError):
            servers.change(endpoints.DESTROY_GROUP, DestroyGroup(group_name=name).to_json())
        servers.close()


class GroupTransport:
    """A `Transport`. The group is made for the first publication and kept as long as the servers are the same; after a
    failure the next publication makes another. A server that was started again under its URL is not in the group: its
    first bucket fails. Buffers of a host are kept too, because their pages take longer to make than to fill; those of a
    GPU are the trainer's memory."""

    limit = BUCKETS

    def __init__(self, target: PublishTarget) -> None:
        self._target = target
        self._pool = Pool(partial(Buffer, device="cuda" if target.backend == "nccl" else "cpu"))
        self._requests = ThreadPoolExecutor(1, thread_name_prefix="announce")
        self._membership: _Membership | None = None
        self._joint: tuple[str, ...] = ()  # the servers in the group
        self._asked = set[str]()  # those of them that are asked to leave it
        self._dissolve: Callable[[], object] = _nothing  # once for each membership

    @contextmanager
    def ready(self, servers: ServerSet) -> Iterator[None]:
        if self._joint != servers.urls:
            self._dissolve()
            self._membership, self._joint = self._joined(servers), servers.urls
            self._asked = set(servers.urls)
            leave = partial(_dissolve, self._membership, self._asked, self._target.key)
            self._dissolve = once_or_with(self, leave)
        try:
            yield
        except BaseException:
            self._joint = ()
            self._asked.intersection_update(servers.answering)
            self._dissolve()
            self._pool.close()
            raise
        if self._target.backend == "nccl":
            self._pool.close()

    def pack(self, part: Sequence[NamedTensor]) -> Send:
        return partial(self._send, self._pool.holding(part))

    def _send(self, buffer: Buffer, servers: ServerSet, version: str | None) -> None:
        if not servers.urls:  # all have been left out
            self._pool.give_back(buffer)
            return
        membership = self._membership
        assert membership is not None, "a bucket is sent outside of `ready`"
        body = UpdateFromDistributed(
            names=[t.name for t in buffer.layout],
            dtypes=[t.dtype_name for t in buffer.layout],
            shapes=[list(t.shape) for t in buffer.layout],
            group_name=membership.name,
            load_format=FLATTENED,
            flush_cache=False,
            weight_version=version,
        )
        answers = _Answers(membership.name, self._target.key, membership.leave)
        asked = self._requests.submit(servers.change, endpoints.UPDATE_FROM_DISTRIBUTED, body.to_json(), answers)
        try:
            work = membership.broadcast(buffer.tensor)
            answers.result_of(asked)
            work.wait()  # it has ended: every server has its result
        except RolloutError:
            raise
        except RuntimeError as e:  # of the group
            membership.leave()
            answers.result_of(asked)
            raise RolloutError(f"the process group for weights failed: {first_line(e)}") from e
        self._pool.give_back(buffer)

    def _joined(self, servers: ServerSet) -> _Membership:
        target, name = self._target, f"miles-like-{secrets.token_hex(8)}"
        size = 1 + target.tp_size * len(servers.urls)
        limit = timedelta(seconds=target.timeout_s)
        listening = listener(address_towards(servers.urls))
        host, port = listening.getsockname()[:2]
        store = [TCPStore(host, port, None, True, limit, False, master_listen_fd=listening.detach())]
        client = TCPStore(host, port, None, False, limit, False)
        bodies = [
            InitGroup(
                master_address=host,
                master_port=port,
                rank_offset=1 + i * target.tp_size,
                world_size=size,
                group_name=name,
                backend=target.backend,
            ).to_json()
            for i in range(len(servers.urls))
        ]
        answers = _Answers(name, target.key, partial(later, store.clear))
        asked = self._requests.submit(servers.change_each, endpoints.INIT_GROUP, bodies, answers)
        try:
            members = join_group(
                client, name=name, rank=0, size=size, backend=target.backend, timeout_s=target.timeout_s
            )
        except RuntimeError as e:
            answers.result_of(asked)
            raise RolloutError(
                f"the process group for weights was not formed within {target.timeout_s:g} s "
                f"(rollout.request_timeout_s): {first_line(e)}"
            ) from e
        membership = _Membership(name, store[0], members)
        try:
            answers.result_of(asked)
        except RolloutError:
            membership.leave()
            raise
        return membership


def _nothing() -> None: ...


def once_or_with(owner: object, leave: Callable[[], object]) -> Callable[[], None]:
    """A function that calls `leave` at its first call. Where it was not called before `owner` is collected, a thread
    calls `leave` then: a collection may begin while the thread that it interrupts holds a lock that `leave` needs."""
    finalizer = weakref.finalize(owner, _leaving(os.getpid()).put, leave)
    finalizer.atexit = False

    def at_once() -> None:
        if finalizer.detach() is not None:
            leave()

    return at_once


@functools.cache
def _leaving(pid: int) -> SimpleQueue[Callable[[], object]]:
    """What a thread of the process `pid`, this one, calls in turn."""
    queue = SimpleQueue[Callable[[], object]]()
    threading.Thread(target=_call_each, args=(queue,), name="leave-groups", daemon=True).start()
    return queue


def _call_each(queue: SimpleQueue[Callable[[], object]]) -> None:
    while True:
        leave = queue.get()
        try:
            leave()
        except Exception:
            _log.exception("a process group of the weights was not left")
        del leave  # it refers to the group


def later(act: Callable[[], None]) -> None:
    """Close the store of a failed join, some seconds later: closing it ends the wait of the other members, but a server
    that has not connected yet would retry for half an hour if it were closed at once."""
    timer = threading.Timer(_CONNECT_S, act)
    timer.daemon = True
    timer.start()


def _dissolve(membership: _Membership, urls: Collection[str], key: ServerKey | None) -> None:
    membership.leave()
    tell_to_leave(urls, membership.name, key)


def address_towards(urls: Sequence[str]) -> str:
    """The address of this host that the servers can reach: loopback if all are there, else that of the interface from
    which packets to the first other one leave."""
    away = next((url for url in urls if not on_loopback(url)), None)
    if away is None:
        return "127.0.0.1"
    parts = urlsplit(away)
    family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as s:
        s.connect(address)  # sends nothing
        return str(s.getsockname()[0])


def listener(host: str) -> socket.socket:
    """A socket that listens at a port outside of those that the kernel gives to outgoing connections. Raises
    RolloutError."""
    for _ in range(_PORTS):
        try:
            return socket.create_server((host, free_port(host)), family=_family(host))
        except OSError as e:
            error = e
    raise RolloutError(f"no port of {host} can be bound for the process group for weights: {error}")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def first_line(e: Exception) -> str:
    return str(e).partition("\n")[0]

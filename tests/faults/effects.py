"""What a fault does in the process that it strikes, from the moment on: garbage, full and hung disks, memory, weights.

`plant` is called in the driver before the others are forked from it. It wraps what the roles do; each wrapper asks
whether this process is the victim and the moment has been. Signals, slowness and partitions come from outside
(points.py).
"""

from __future__ import annotations

import errno
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.faults import points
from tests.faults.cells import Cell

HOUR_S = 3600.0
_OPERATIONS = ("train", "publish", "save", "load", "wake", "sleep", "logprobs")  # of a rank
_me: tuple[int, str] = (0, "")  # of this process: pid, role; "": it takes the place of one that was struck


def plant(cell: Cell) -> None:
    """In the driver."""
    be("driver")
    kind = cell.kind
    if kind in ("disk full", "disk hung"):
        _wrap_fsync(kind)
        if cell.role in ("server head", "teacher"):
            _wrap_engine(partial(_lose_log, kind))
    elif kind in ("out of memory", "device out of memory"):
        _plant_memory(cell.role, kind)
    elif kind == "garbage":
        _plant_garbage(cell.role)
    elif kind == "bit flip":
        _plant_flip(cell.role)


def be(role: str) -> None:
    """This process plays a role."""
    global _me
    _me = os.getpid(), "" if points.struck() else role
    if role != "driver":  # which forks the others first
        clock_of(role)


def clock_of(role: str) -> None:
    """From the moment on this process has another wall clock, if it is the victim: libfaketime reads its offset from
    the environment once a second."""
    cell = points.cell()
    if cell is None or cell.kind != "clock jump" or role != cell.role or points.struck():
        return

    def watch() -> None:
        while not points.struck():
            select.select([], [], [], 0.05)
        os.environ["FAKETIME"] = "+1d"

    threading.Thread(target=watch, daemon=True).start()


def _struck(*roles: str) -> bool:
    """Whether this process has one of these roles, is the victim, and the moment has been."""
    cell = points.cell()
    return cell is not None and _me == (os.getpid(), cell.role) and cell.role in roles and points.struck()


def in_server(last: bool) -> None:
    """Before a rollout server serves."""
    from tests.support import forked, kill_points

    be("server head" if last else "another server")
    if not last:
        vars(kill_points)["_kills"] = ()  # it does not come to the moment
    from rollout.embedded.ranks import crew

    follow = crew.follow

    def part(*arguments: Any, **more: Any) -> Any:
        forked._prctl(forked._PDEATHSIG, signal.SIGKILL)  # a stopped one ends with its head, as by a run's guard
        be("server part" if last else "another part")
        return follow(*arguments, **more)

    vars(crew)["follow"] = part


# ---- disks


def _wrap_fsync(kind: str) -> None:
    """Every file that counts is synced before it counts."""
    plain = os.fsync

    def fsync(fd: Any) -> None:
        if _struck("driver", "rank"):
            if kind == "disk hung":
                time.sleep(HOUR_S)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(fd)

    vars(os)["fsync"] = fsync


def _lose_log(kind: str, engine: Any) -> None:
    """A server's files are its log: on a full disk, or in a pipe that is full and not read."""
    if kind == "disk full":
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        _, target = os.pipe()
        os.set_blocking(target, False)
        try:
            while True:
                os.write(target, b"." * 4096)
        except BlockingIOError:
            os.set_blocking(target, True)
    for fd in (1, 2):
        os.dup2(target, fd)


# ---- servers


def _wrap_engine(act: Callable[[Any], None]) -> None:
    """`act` once, at the next step of the engine."""
    from rollout.embedded.engine.engine import Engine

    plain, done = Engine.step, list[bool]()

    def step(self: Any) -> bool:
        if not done and _struck("server head", "teacher"):
            done.append(True)
            act(self)
        return plain(self)

    Engine.step = step  # type: ignore[method-assign]


def _raise(kind: str, *_: Any) -> None:
    if kind == "out of memory":
        raise MemoryError("cannot allocate 1234 bytes")
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.18 GiB")


def _plant_memory(role: str, kind: str) -> None:
    if role in ("server head", "teacher"):
        _wrap_engine(partial(_raise, kind))
        from rollout.embedded.server.service import Service

        _wrap(Service, "update", lambda *_: _raise(kind), role)
    elif role == "server part":
        from rollout.embedded.ranks.follower import Follower

        for name in ("forward", "stage", "resume"):
            _wrap(Follower, name, lambda *_: _raise(kind), role)
    elif role == "rank":
        from miles_like.cluster.rank import Rank

        for name in _OPERATIONS:
            _wrap(Rank, name, lambda *_: _raise(kind), role)
    elif role == "driver":
        from miles_like.loop.recorder import Recorder

        _wrap(Recorder, "write_step", lambda *_: _raise(kind), role)


def _wrap(of: type, name: str, act: Callable[..., None], role: str) -> None:
    """`act` before each call of a method in the victim, from the moment on."""
    plain = getattr(of, name)

    def watched(*arguments: Any, **more: Any) -> Any:
        if _struck(role):
            act(*arguments)
        return plain(*arguments, **more)

    setattr(of, name, watched)


def _plant_garbage(role: str) -> None:
    if role in ("server head", "teacher"):
        from rollout.embedded.server import app

        make = app.make_app
        vars(app)["make_app"] = lambda *arguments, **more: _Nonsense(make(*arguments, **more))
    elif role == "server part":
        from rollout.embedded.ranks.follower import Follower

        forward = Follower.forward

        def nonsense(self: Any, batch: Any) -> None:
            if _struck(role):
                for _, held in sorted(self._part.store._stored.items()):
                    if isinstance(held, torch.Tensor) and held.is_floating_point():
                        held.fill_(float("nan"))
            forward(self, batch)

        Follower.forward = nonsense  # type: ignore[method-assign]


def poison(rank: Any) -> None:
    """In the victim: its part of the optimizer's state becomes NaN at the next step."""
    part = rank.trainer.optimizer.chained_optimizers[-1]
    plain = part.step_with_ready_grads

    def step() -> Any:
        if _struck("rank"):
            for group in part.optimizer.param_groups:
                for p in group["params"]:
                    p.grad.fill_(float("nan"))
        return plain()

    part.step_with_ready_grads = step


class _Nonsense:
    """An ASGI application that answers every POST with bytes that are no JSON, once it is struck."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not _struck("server head", "teacher"):
            await self._app(scope, receive, send)
            return
        while (await receive()).get("more_body"):
            continue
        body = b"\x00\xff nonsense"
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


# ---- weights


def _plant_flip(role: str) -> None:
    """A bit in the mantissa of one value of a norm of the last layer."""
    if role == "server part":
        from rollout.embedded.ranks.follower import Follower

        done = list[bool]()

        def once(follower: Any, *_: Any) -> None:
            if not done:
                done.append(True)
                flip(follower._part.store)

        for name in ("forward", "stage", "begin"):
            _wrap(Follower, name, once, role)
        return
    from rollout.embedded.server.service import Service

    make, services = Service.__init__, list[Any]()

    def made(self: Any, *arguments: Any, **more: Any) -> None:
        make(self, *arguments, **more)
        services.append(self)

    Service.__init__ = made  # type: ignore[method-assign]
    _wrap_engine(lambda engine: flip(services[-1].store))


def flip(store: Any) -> str:
    """Flips it and returns the tensor's name."""
    name = max(n for n in store._stored if n.endswith("post_attention_layernorm.weight"))
    held = store._stored[name]
    width = {2: torch.int16, 4: torch.int32}[held.element_size()]
    held.view(width)[3] ^= 1 << (20 if held.element_size() == 4 else 4)
    return str(name)

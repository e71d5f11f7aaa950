"""Processes forked from one that has imported everything, where a fresh one would take five seconds to begin.

`Starter` is the test's hold on such a process, which forks one for each job; a job forks its own as `Forked`. When a
job has ended, by itself or by SIGKILL, all that it has started has ended too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch

from tests.support.spawn import warm_context

# what a driver, a rank or a server imports when it first needs it, most of a second in all
ON_DEMAND = (
    "datasets",
    "rollout.embedded.server.app",
    "transformers",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.deepseek_v3.configuration_deepseek_v3",
)
USERS_ERRORS = (ValueError, RuntimeError, OSError, MemoryError)  # one sentence each, as the command line says them
BUSY_S = 240.0  # for what an idle machine does in fifteen seconds
_PDEATHSIG, _SUBREAPER = 1, 36  # of prctl(2)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def redirect(path: Path, *descriptors: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for own in descriptors:
        os.dup2(fd, own)
    os.close(fd)


def _settle_torch() -> None:
    """First, in a forked process: torch recreates its thread pool at its first use after a fork, and if two threads use
    it at once, torch raises that there is none."""
    torch.set_num_threads(1)


class Forked:
    """A process, forked from this one before it has threads, that answers calls through a pipe until it ends."""

    def __init__(self, label: str, serve: Callable[[Connection], None], log: Path) -> None:
        self.label = label
        self._line, theirs = multiprocessing.Pipe()
        self._there = True
        self._calling = threading.Lock()
        self.pid = os.fork()
        if not self.pid:
            _prctl(_PDEATHSIG, signal.SIGKILL)
            self._line.close()
            redirect(log, 1, 2)
            _settle_torch()
            code = 1
            try:
                serve(theirs)
                code = 0
            except EOFError:
                code = 0
            except BaseException:  # this process's edge
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        theirs.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """Blocks. Raises RuntimeError with the error of the process, or Gone."""
        try:
            with self._calling:
                self._line.send_bytes(pickle.dumps((method, arguments)))
                error, answer = pickle.loads(self._line.recv_bytes())
        except (EOFError, OSError):
            raise Gone(f"{self.label}: its process died") from None
        if error is not None:
            raise RuntimeError(f"{self.label}: {error}")
        return answer

    @property
    def ended(self) -> bool:
        """Whether the process has ended, by itself or by a signal."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return not self._there or os.waitid(os.P_PID, self.pid, options) is not None

    def kill(self) -> None:
        if self._there:
            self._there = False
            os.kill(self.pid, signal.SIGKILL)  # until it is waited for, its number is not reused
            os.waitpid(self.pid, 0)


class Gone(RuntimeError):
    """Rather than what the others say of the connection that they lost."""


def answers(target: Callable[[], Any]) -> Callable[[Connection], None]:
    """Serves the methods of what `target` makes."""

    def serve(line: Connection) -> None:
        own = target()
        answer: tuple[str | None, Any]
        while True:
            method, arguments = pickle.loads(line.recv_bytes())
            try:
                answer = (None, getattr(own, method)(*arguments))
            except USERS_ERRORS as e:
                traceback.print_exc()
                answer = (str(e), None)
            line.send_bytes(pickle.dumps(answer))

    return serve


def _fork_server(line: Connection, modules: tuple[str, ...]) -> None:
    """Forks a process for each job and waits until it and all its descendants are gone."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # as in warm.py: ranks collect garbage at each of their checkpoints
    _prctl(_SUBREAPER, 1)
    while True:
        try:
            log, fn, arguments = pickle.loads(line.recv_bytes())
        except EOFError:
            return
        pid = os.fork()
        if not pid:
            line.close()
            os.setsid()
            redirect(log, 1, 2)
            _settle_torch()
            code = 1
            try:
                code = fn(*arguments) or 0
            except BaseException:  # this process's edge
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        line.send_bytes(pickle.dumps(pid))
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        line.send_bytes(pickle.dumps(os.waitstatus_to_exitcode(status)))


class Starter:
    """A context manager."""

    def __init__(self, *modules: str) -> None:
        """`modules` and those of ON_DEMAND are imported once."""
        context = warm_context()
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=_fork_server, args=(theirs, (*ON_DEMAND, *modules)))
        self.process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.kill()

    def call(self, log: Path, fn: Callable[..., Any], *arguments: Any, timeout_s: float = BUSY_S) -> int:
        """fn(*arguments) in a forked process, which ends; its exit status, negative for a signal. Everything that it
        has started has ended too."""
        self.line.send_bytes(pickle.dumps((log, fn, arguments)))
        pid = pickle.loads(self.line.recv_bytes())
        if not self.line.poll(timeout_s):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self.line.recv_bytes()
            raise AssertionError(f"not done within {timeout_s:g} s; {log} ends:\n{tail(log)}")
        status: int = pickle.loads(self.line.recv_bytes())
        return status


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text().splitlines()[-lines:])

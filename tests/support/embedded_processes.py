"""Embedded servers as processes, which a test kills, stops and starts again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx

from tests.support.forked import redirect
from tests.support.spawn import free_port, warm_context

START_S = 120.0


def _serve(arguments: Sequence[str], log: Path) -> None:
    from rollout.embedded.server.app import main

    os.environ["OMP_NUM_THREADS"] = "1"
    redirect(log, 1, 2)
    raise SystemExit(main(arguments))


@dataclass
class ServerProcess:
    """A server of the checkpoint `path` at `port`."""

    path: Path
    port: int
    log: Path
    process: BaseProcess

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Returns once it has ended."""
        if self.process.is_alive():
            self.send(signal.SIGKILL)
        self.process.join(30)

    def await_ready(self) -> None:
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=20, trust_env=False).status_code == 200:
                    return
            assert self.process.is_alive() and time.monotonic() < until, self.log.read_text()
            time.sleep(0.02)


def begun(path: Path, log: Path, *more: str, port: int | None = None) -> ServerProcess:
    """A server that begins to start."""
    port = port or free_port()
    arguments = ["--model-path", str(path), "--port", str(port), "--threads", "1", "--weight-version", "0", *more]
    alone = "--tp-size" not in more  # a daemon has no children, as ranks are
    process = warm_context().Process(target=_serve, args=(arguments, log), daemon=alone)
    process.start()
    return ServerProcess(path, port, log, process)


@contextlib.contextmanager
def server_processes(path: Path, count: int, *more: str) -> Iterator[list[ServerProcess]]:
    """`count` servers of one checkpoint, once all answer. They are killed at the end."""
    servers = [begun(path, path.parent / f"server{i}.log", *more) for i in range(count)]
    try:
        for server in servers:
            server.await_ready()
        yield servers
    finally:
        for server in servers:
            server.kill()

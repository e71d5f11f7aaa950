"""The start of servers: phases by their logs, limits, failures. Servers are the embedded engine, and scripts in the
place of `sglang.launch_server` where a stock server would span nodes or take minutes.

tests/sglang_cpu holds the marks of the phases to stock SGLang's source.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.config import RolloutConfig, SGLangFlags, VLLMFlags
from rollout.sglang import startup
from rollout.sglang.http_replies import RolloutError
from rollout.sglang.phases import STOCK, FollowedLog, last_error
from rollout.sglang.ports import free_blocks, free_port
from rollout.sglang.servers import ServerLaunch
from rollout.sglang.startup import Progress, Startup, launch_server
from tests.support.fakes import wait_until
from tests.support.refusals import refuses
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

LONG = pytest.mark.long(beside="tests/rollout/sglang/test_startup.py")
ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys, time
from pathlib import Path
flags = {a: b for a, b in zip(sys.argv, sys.argv[1:]) if a.startswith("--")}
exec((Path(__file__).parent / f"part{flags.get('--node-rank', 0)}.py").read_text())
"""
LOADS = "print('[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=70.00 GB', flush=True)\n"
SERVES = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""
SLEEPS = "time.sleep(60)\n"
SHARES = """
import socket
class Shared(http.server.HTTPServer):
    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()
Shared(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServerLaunch]:
    """The launch of a server whose part on each node runs the given lines."""
    write_checkpoint(tmp_path / "hf", tiny(), random_tensors(tiny()))
    package = tmp_path / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{ROOT}")

    def launch(*parts: str, **limits: float) -> ServerLaunch:
        for i, lines in enumerate(parts):
            (package / f"part{i}.py").write_text(lines)
        return ServerLaunch(
            model_path=tmp_path / "hf",
            config=RolloutConfig(engine="sglang", sglang=SGLangFlags(), **limits),
            log_dir=tmp_path / "logs",
            port=free_port(),
            index=1,
            nnodes=len(parts),
            dist_init_addr=f"127.0.0.1:{free_blocks(1)}",
        )

    return launch


def until(start: Startup, wanted: Callable[[Progress], bool]) -> list[Progress]:
    """What `poll` returns, without repetitions, up to the wanted one."""
    seen: list[Progress] = []
    deadline = time.monotonic() + 60
    while not (seen and wanted(seen[-1])):
        assert time.monotonic() < deadline, seen
        if not seen or seen[-1] != (found := start.poll()):
            seen.append(start.poll() if not seen else found)
        time.sleep(0.02)
    return seen


@pytest.mark.long(beside="tests/miles_like/cluster/test_rollout_servers.py")
def test_an_embedded_server_tells_its_phases(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "hf", tiny(), random_tensors(tiny()))
    start = Startup(ServerLaunch(model_path=model, config=RolloutConfig(), log_dir=tmp_path / "logs", index=0))
    try:
        phases = [p.phase for p in until(start, lambda p: p.ready)]
        order = ["starting", "loading weights", "warming up", "ready"]
        assert phases == [phase for phase in order if phase in phases] and phases[0] == "starting"
        text = start.handle.log.read_text()
        assert text.index("Load weight begin") < text.index("Load weight end")
        os.killpg(start.handle.pid, 9)
        assert wait_until(lambda: start.poll().failure is not None, 20)
    finally:
        start.handle.stop()
    failed = start.poll()
    with refuses(RolloutError, "rollout server 0", "SIGKILL", start.handle.log, unrecorded="a free port"):
        raise RolloutError(failed.failure)
    assert 0 <= time.monotonic() - failed.failed_at < 30


@pytest.mark.parametrize(
    ("limits", "lines", "facts"),
    [
        pytest.param({"start_timeout_s": 3}, SLEEPS, ("starting", 3, "rollout.start_timeout_s"), marks=LONG),
        ({"load_timeout_s": 0.2}, LOADS + SLEEPS, ("loading weights", 0.2, "rollout.load_timeout_s")),
        ({"start_timeout_s": 3}, LOADS + SLEEPS, ("loading weights", 3, "rollout.start_timeout_s")),
        (
            {"warmup_timeout_s": 0.3},
            LOADS + "print('Capture target decode CUDA graph begin. backend=x', flush=True)\n" + SLEEPS,
            ("capturing graphs", 0.3, "rollout.warmup_timeout_s"),
        ),
    ],
)
def test_a_phase_that_takes_too_long_is_named_with_its_key(
    stock: Callable[..., ServerLaunch], limits: dict[str, float], lines: str, facts: tuple[object, ...]
) -> None:
    """A phase without a separate limit counts for the whole start's."""
    launch = stock(lines, **limits)
    log = launch.log_dir / f"sglang_{launch.port}.0.log"
    with refuses(RolloutError, *facts, "rollout server 1", log, unrecorded="a free port"):
        launch_server(launch)


def test_time_in_which_nothing_looks_at_the_server_does_not_count(
    stock: Callable[..., ServerLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks the driver builds its trainer, or is suspended: five seconds of it count, and the limit is
    reached by looks that follow each other."""
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=time.sleep)
    monkeypatch.setattr(startup, "time", clock)
    start = Startup(stock(SLEEPS, start_timeout_s=12))
    try:
        for passed in (3600, 3600, 1.5):
            now[0] += passed
            assert start.poll().failure is None
        now[0] += 1
        failed = start.poll()
    finally:
        start.handle.stop()
    with refuses(RolloutError, "starting", 12, "rollout.start_timeout_s", unrecorded="a free port"):
        raise RolloutError(failed.failure)


def test_the_first_of_several_parts_to_fail_is_known_by_its_time(stock: Callable[..., ServerLaunch]) -> None:
    """The second part dies first, by its own error; the head follows with ten lines about a lost connection. Both are
    looked at only later."""
    dies = "time.sleep(0.5)\nraise RuntimeError('CUDA error: out of memory on device 3')"
    follows = "time.sleep(2.5)\nprint('lost\\n' * 10)\nraise ConnectionResetError('Connection reset by peer')"
    launch = stock(LOADS + follows, LOADS + dies)
    parts = [Startup(replace(launch, node_rank=i, port=free_port())) for i in range(2)]
    try:
        assert wait_until(lambda: all(part.handle.ended() for part in parts), 60)
        head, second = (part.poll() for part in parts)
    finally:
        for part in parts:
            part.handle.stop()
    assert head.failed_at > second.failed_at + 1
    facts = (
        "rollout server 1, part 1 of 2",
        "exit code 1",
        "loading weights",
        "out of memory on device 3",
        parts[1].handle.log,
    )
    with refuses(RolloutError, *facts, unrecorded="a free port"):
        raise RolloutError(second.failure)
    assert "Traceback" not in str(second.failure)


def test_a_port_of_a_stock_server_that_is_in_use_is_named_before_it_starts(stock: Callable[..., ServerLaunch]) -> None:
    launch = stock(SLEEPS)
    assert launch.dist_init_addr is not None
    taken = int(launch.dist_init_addr.rpartition(":")[2])
    config = RolloutConfig(engine="sglang", sglang=SGLangFlags(tp_size=2, dp_size=2, enable_dp_attention=True))
    with socket.create_server(("127.0.0.1", taken + 6)):
        facts = ("rollout server 1", taken + 6, socket.gethostname(), "rollout.sglang.dist_init_port")
        with refuses(ValueError, *facts, unrecorded="a free port"):
            launch_server(replace(launch, config=config))
    assert not launch.log_dir.exists()


class Stranger:
    """A context manager: another run's server, which answers /health at a port."""

    def __init__(self, port: int | None) -> None:
        assert port is not None
        self.asked: list[str] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_POST = do_GET

            def log_message(self, *_: object) -> None: ...

        class Server(ThreadingHTTPServer):
            allow_reuse_port = True

        self._http = Server(("127.0.0.1", port), Handler)

    def __enter__(self) -> Stranger:
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


_OTHER = pytest.mark.long(beside="tests/rollout/sglang/test_startup.py")


@pytest.mark.parametrize(
    "engine", ["embedded", pytest.param("sglang", marks=_OTHER), pytest.param("vllm", marks=_OTHER)]
)
def test_a_server_of_another_run_that_answers_at_the_port_is_not_taken_for_this_one(
    stock: Callable[..., ServerLaunch], tmp_path: Path, engine: str
) -> None:
    """Two runs on one machine whose nodes are of separate Rays take the same first port, and a server takes a minute
    from the check of its port to listening there."""
    launch = stock(SLEEPS, start_timeout_s=2)
    if engine != "sglang":
        (program := tmp_path / "python").write_text("#!/bin/sh\nexec sleep 60\n")
        program.chmod(0o700)
        given: dict[str, Any] = {"engine": engine, "sglang": SGLangFlags(), "vllm": VLLMFlags(python=str(program))}
        if engine == "embedded":
            del given["vllm"]
        launch = replace(launch, config=RolloutConfig(start_timeout_s=2, **given), dist_init_addr=None)
    if engine == "embedded":
        shutil.rmtree(launch.model_path)  # it ends before it listens
    start = Startup(launch)
    try:
        with Stranger(launch.port) as other:
            failed = until(start, lambda p: p.failure is not None or p.ready)[-1]
    finally:
        start.handle.stop()
    assert set(other.asked) <= {"/health"}, "nothing is changed there"
    facts = () if engine == "embedded" else (2, "rollout.start_timeout_s", f"process {os.getpid()}", "rollout.port")
    with refuses(RolloutError, "rollout server 1", *facts, unrecorded="a free port"):
        raise RolloutError(failed.failure)


def test_a_port_that_two_servers_share_is_refused(stock: Callable[..., ServerLaunch]) -> None:
    """The kernel lets two programs of one user listen at a port where both ask for it, as vLLM does."""
    launch = stock(SERVES.partition("http.server.HTTPServer")[0] + SHARES)
    start = Startup(launch)
    try:
        with Stranger(launch.port):
            failed = until(start, lambda p: p.failure is not None or p.ready)[-1]
    finally:
        start.handle.stop()
    with refuses(RolloutError, "rollout server 1", f"process {os.getpid()}", "rollout.port", unrecorded="a free port"):
        raise RolloutError(failed.failure)


@LONG
def test_a_free_port_that_another_program_takes_first_is_left_to_it(
    stock: Callable[..., ServerLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the choice of a free port and listening there."""
    launch = replace(stock(SERVES), port=None, index=None)
    monkeypatch.setattr(startup, "check_ports", lambda ports, host, server: None)
    monkeypatch.setattr(startup, "_HEALTH_S", 0.2)  # the other program does not answer
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        choices = [taken, free_port()]
        monkeypatch.setattr(startup, "free_port", lambda host: choices.pop(0))
        with launch_server(launch) as server:
            assert not choices and server.url != f"http://127.0.0.1:{taken}"
        monkeypatch.setattr(startup, "free_port", lambda host: taken)
        with refuses(RolloutError, taken, "exit code 1", launch.log_dir / f"sglang_{taken}.0.log", unrecorded="a port"):
            launch_server(launch)


def test_a_log_is_followed_as_it_grows(tmp_path: Path) -> None:
    """Lines come in pieces, from ranks that are not at the same point; what was in the file before does not count."""
    log = tmp_path / "log"
    log.write_text("The server is fired up and ready to roll!\n")
    followed, seen = FollowedLog(log, STOCK, log.stat().st_size), list[str]()
    pieces = (
        "Init parallel beg",
        "in.\n",
        "x Load weight begin\n",
        "TP1 Load weight end\nTP0 Load weight begin\n",
        "Capture target prefill CUDA graph begin. b",
        "\nUvicorn running on http",
        "TP0 Load weight end\n",
    )
    for text in pieces:
        with log.open("a") as f:
            f.write(text)
        seen.append(followed.phase().words)
    assert seen == [
        "starting",
        "connecting its ranks",
        "loading weights",
        "allocating its cache",
        "capturing graphs",
        "warming up",
        "warming up",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\nTraceback\n  File x\nValueError: no key 'b'\n\n", "ValueError: no key 'b'"),
        ("torch.OutOfMemoryError: CUDA out of memory.\nstopping\nbye\n", "torch.OutOfMemoryError: CUDA out of memory."),
        ("[2026 TP3] Error: x\n[2026 TP0] closed\n", "[2026 TP3] Error: x"),
        ("error: no config.json\n", "error: no config.json"),
        ("one\ntwo\n", "two"),
        ("", "(an empty log)"),
    ],
)
def test_the_last_error_of_a_log(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "log").write_text(text)
    assert last_error(tmp_path / "log") == line
    assert last_error(tmp_path / "none") == "(no log)"


def test_an_error_of_a_server_before_is_not_that_of_the_one_in_its_place(stock: Callable[..., ServerLaunch]) -> None:
    launch = stock("sys.exit(3)\n")
    launch.log_dir.mkdir()
    (launch.log_dir / f"sglang_{launch.port}.0.log").write_text("CUDA error: out of memory\n")
    with pytest.raises(RolloutError, match="exit code 3") as caught:
        launch_server(launch)
    assert "out of memory" not in str(caught.value)

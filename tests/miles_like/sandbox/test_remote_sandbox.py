"""The client of a SandboxFusion server, against a server with that API: its request and response models
(sandbox/server/sandbox_api.py, sandbox/runners/types.py at 53a6341), with bash and python run by this process.

Not covered: SandboxFusion itself, which needs its own container image.
"""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from miles_like.sandbox.config import SandboxConfig
from miles_like.sandbox.judging import judge, read_tests
from miles_like.sandbox.make import make_sandbox, shared_sandbox, try_sandbox
from miles_like.sandbox.program import Program, Ran, SandboxLost, Status
from tests.support.refusals import refuses


class RunCodeRequest(BaseModel):
    """The fields that the server's model has; it ignores others, this one refuses them."""

    model_config = ConfigDict(extra="forbid")
    compile_timeout: float = 10
    run_timeout: float = 10
    memory_limit_MB: int = -1
    code: str
    stdin: str | None = None
    language: Literal["python", "bash"]
    files: dict[str, str | None] = Field({})
    fetch_files: list[str] = Field([])
    args: list[str] = Field([])


def executed(request: RunCodeRequest) -> dict[str, Any]:
    """As the server's runners of python and bash do."""
    with tempfile.TemporaryDirectory() as name:
        for path, content in request.files.items():
            (Path(name) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(name) / path).write_bytes(base64.b64decode(content or ""))
        words = [sys.executable, "-c", request.code] if request.language == "python" else ["bash", "-c", request.code]
        result: dict[str, Any] = {"status": "Finished", "execution_time": 0.01, "return_code": None}
        try:
            done = subprocess.run(
                words, cwd=name, input=(request.stdin or "").encode(), capture_output=True, timeout=request.run_timeout
            )
            result |= {"return_code": done.returncode, "stdout": done.stdout.decode(), "stderr": done.stderr.decode()}
        except subprocess.TimeoutExpired:
            result |= {"status": "TimeLimitExceeded", "stdout": "", "stderr": ""}
    status = "Success" if result["return_code"] == 0 else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": result, "files": {}}


Reply = Callable[[RunCodeRequest], tuple[int, Any]]


@contextmanager
def server(reply: Reply) -> Iterator[SandboxConfig]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, found = reply(RunCodeRequest.model_validate_json(body)) if self.path == "/run_code" else (404, {})
            text = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield SandboxConfig(
            kind="remote", url=f"http://127.0.0.1:{http.server_address[1]}", wall_s=2, output_kb=4, retries=1
        )
        http.shutdown()


def ran(config: SandboxConfig, program: Program) -> Ran:
    async def ask() -> Ran:
        sandbox = make_sandbox(config)
        try:
            return await sandbox.run(program)
        finally:
            await sandbox.close()

    return asyncio.run(ask())


def test_programs_and_how_they_end() -> None:
    with server(lambda request: (200, executed(request))) as config:
        code = "import sys; print(open('a/b').read(), sys.stdin.read(), end='')"
        assert ran(config, Program(code=code, files={"a/b": b"c"}, stdin=b"d")).stdout == "c d"
        assert ran(config, Program(argv=("echo", "a $HOME"))).stdout == "a $HOME\n"
        ends = {
            "raise SystemExit(3)": (Status.EXIT, 3),
            "import os; os.kill(os.getpid(), 9)": (Status.SIGNAL, 9),
            "while True: pass": (Status.TIME, -1),
            "raise MemoryError": (Status.MEMORY, -1),
            "print('x' * 9000)": (Status.OUTPUT, -1),
        }
        for text, end in ends.items():
            found = ran(config, Program(code=text, wall_s=1))
            assert (found.status, found.code) == end, text
        try_sandbox(config)
        shared = shared_sandbox(config)  # by a check before a run and by the run, each with its event loop
        assert shared_sandbox(config) is shared
        assert [asyncio.run(shared.run(Program(code=f"print({n})"))).stdout for n in (1, 2)] == ["1\n", "2\n"]


def test_the_tests_of_a_program_run_there() -> None:
    with server(lambda request: (200, executed(request))) as config:

        async def ask() -> int:
            sandbox = make_sandbox(config)
            tests = read_tests(["assert f(1) == (1, 2)", "def test_it():\n    assert f(2)[1] == 3", "assert f(1) == 0"])
            try:
                return (await judge(sandbox, "def f(n): return n, n + 1", tests)).passed
            finally:
                await sandbox.close()

        assert asyncio.run(ask()) == 2


@pytest.mark.parametrize(
    ("reply", "facts"),
    [
        ((503, {}), ("HTTP", 503)),
        ((200, {"status": "SandboxError", "message": "no room", "run_result": None}), ("no room",)),
    ],
)
def test_a_server_that_cannot_is_asked_again_and_then_lost(
    reply: tuple[int, Any], facts: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("miles_like.sandbox.remote.asyncio.sleep", sleep)
    with server(lambda request: reply) as config:
        with refuses(SandboxLost, *facts, unrecorded="a port"):
            ran(config, Program(code="1"))
        assert waits == [1.0]
        answers = iter([reply, (200, executed(RunCodeRequest(code="print(1)", language="python")))])
    with server(lambda request: next(answers)) as config:
        assert ran(config, Program(code="1")).stdout == "1\n"


def test_what_is_no_such_server_is_refused() -> None:
    with server(lambda request: (200, {"ok": True})) as config:
        with refuses(ValueError, "SandboxFusion", "sandbox.url", unrecorded="a port"):
            ran(config, Program(code="1"))
        with refuses(ValueError, 404, "sandbox.url", unrecorded="a port"):
            ran(config.model_copy(update={"url": f"{config.url}/x"}), Program(code="1"))
    with refuses(ValueError, "sandbox.url", "ConnectError", unrecorded="a port"):
        try_sandbox(config)

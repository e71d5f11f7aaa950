"""Sandboxes that stay: a slot runs one program after another in its sandbox, whose first process (inside.py) forks for
each.

Each slot is a thread, which starts its sandbox and talks to it. bubblewrap's --die-with-parent means the thread that
started it, so a sandbox ends with its slot, and with this process whatever ends it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import platform
import queue
import select
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_like.limits.regular_files import parse_json
from miles_like.sandbox.config import SandboxConfig
from miles_like.sandbox.containers import forget_container, program_user
from miles_like.sandbox.program import Program, Ran, SandboxLost, Status
from miles_like.sandbox.seccomp import seccomp_filter
from miles_like.variables import inherited

# (slot, arguments of the interpreter) -> a command whose standard input and output are those of the interpreter
Launch = Callable[[int, Sequence[str]], list[str]]
INNER = ("-s", "-B", "-c", Path(__file__).with_name("inside.py").read_text(encoding="utf-8"))
_SPARE_S = 10.0  # for a sandbox to answer after the time limit of its program
_ENDS_S = 3.0  # for a container to end by itself
_TRIES = 2  # sandboxes in which a program is run before it counts as lost
_REPLY_BYTES = 64 << 20


class SandboxPool:
    """A Sandbox of `slots` slots, which start when they are needed. It may be used from any thread or event loop."""

    def __init__(self, config: SandboxConfig, launch: Launch) -> None:
        self.slots = config.slots or len(os.sched_getaffinity(0))
        self._config, self._launch = config, launch
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._slots: list[_Slot] = []
        self._lock, self._waiting = threading.Lock(), 0  # jobs that no slot has ended

    async def run(self, program: Program) -> Ran:
        job = self._begin(program)
        try:
            return await asyncio.wrap_future(job.done)
        except asyncio.CancelledError:
            job.cancel()
            raise

    def run_now(self, program: Program) -> Ran:
        """`run` for a caller without an event loop; it blocks."""
        return self._begin(program).done.result()

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        """`close` for a caller without an event loop. Returns when every sandbox has ended."""
        with self._lock:
            slots, self._slots = self._slots, []
        for slot in slots:
            slot.closed = True
            self._jobs.put(None)
        for slot in slots:
            slot.kill()
        for slot in slots:
            slot.thread.join()

    def _begin(self, program: Program) -> _Job:
        size = sum(map(len, program.files.values()))
        if size > self._config.disk_mb << 20:
            raise ValueError(
                f"the files of a program have {size:,} bytes, but sandbox.disk_mb = {self._config.disk_mb}: raise it"
            )
        job = _Job(program)
        with self._lock:
            self._waiting += 1
            job.done.add_done_callback(self._end)
            if self._waiting > len(self._slots) < self.slots:
                self._slots.append(_Slot(len(self._slots), self._config, self._launch, self._jobs))
        self._jobs.put(job)
        return job

    def _end(self, done: Future[Ran]) -> None:
        with self._lock:
            self._waiting -= 1


@dataclass(eq=False)
class _Job:
    program: Program
    done: Future[Ran] = field(default_factory=Future)
    cancelled: bool = False
    slot: _Slot | None = None

    def cancel(self) -> None:
        self.cancelled = True
        if self.slot is not None and self.slot.job is self:
            self.slot.kill()


class _Slot:
    """One thread, and its sandbox."""

    def __init__(
        self, number: int, config: SandboxConfig, launch: Launch, jobs: queue.SimpleQueue[_Job | None]
    ) -> None:
        self._number, self._config, self._launch, self._jobs = number, config, launch, jobs
        self._box: _Box | None = None
        self.job: _Job | None = None  # that it runs
        self.closed = False
        self.thread = threading.Thread(target=self._work, name=f"sandbox {number}", daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """End the sandbox; the program in it counts as lost."""
        if (box := self._box) is not None:
            box.kill()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.cancelled or not job.done.set_running_or_notify_cancel():
                if not job.done.done():
                    job.done.set_exception(SandboxLost("cancelled"))
                continue
            job.slot, self.job = self, job
            try:
                ran = self._run(job)
            except BaseException as e:
                self.job = None
                job.done.set_exception(e)
            else:
                self.job = None
                job.done.set_result(ran)
        self._drop()

    def _run(self, job: _Job) -> Ran:
        if self.closed:
            raise SandboxLost("its pool was closed")
        for attempt in range(_TRIES):
            try:
                if self._box is None:
                    self._box = _Box(self._launch(self._number, INNER), self._config)
                    if self.closed:  # `kill` may have found no box
                        raise SandboxLost("its pool was closed")
                    self._box.start()
                ran, clean = self._box.run(job.program)
            except SandboxLost:
                self._drop()
                if job.cancelled or self.closed or attempt + 1 == _TRIES:
                    raise
            else:
                if not clean or self._box.runs >= self._config.runs_per_sandbox:
                    self._drop()
                return ran
        raise AssertionError("unreachable")

    def _drop(self) -> None:
        if self._box is not None:
            self._box.end()
        self._box = None


class _Box:
    """One sandbox."""

    def __init__(self, command: Sequence[str], config: SandboxConfig) -> None:
        self._config, self._command, self.runs = config, command, 0
        self._lock, self._started, self._doomed = threading.Lock(), False, False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the sandbox
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        # runsc changes its root to the temporary directory, which must be one that every user may read
        variables = {name: value for name, value in inherited().items() if name != "TMPDIR"}
        try:
            self._process = subprocess.Popen(command, bufsize=0, env=variables, **pipes)  # type: ignore[call-overload]
        except OSError as e:
            self._errors.close()
            raise SandboxLost(f"{command[0]}: {e.strerror}") from None
        os.set_blocking(self._process.stdin.fileno(), False)

    def start(self) -> None:
        c = self._config
        limits = {
            "memory": c.memory_mb << 20,
            "cpu": c.cpu_s,
            "processes": c.processes,
            "disk": c.disk_mb << 20,
            "output": c.output_kb << 10,
            "user": program_user(c),
        }
        code = base64.b64encode(seccomp_filter(platform.machine())).decode()
        hello = self._exchange({"limits": limits, "filter": code}, b"", c.start_timeout_s)
        with self._lock:
            self._started = True
        if self._doomed:
            raise SandboxLost("it was ended at its start")
        if not hello["filtered"] and code:
            raise SandboxLost("the kernel did not take the system call filter")

    def run(self, program: Program) -> tuple[Ran, bool]:
        """The program's end, and whether the sandbox can run another one."""
        self.runs += 1
        wall = min(program.wall_s or self._config.wall_s, self._config.wall_s)
        files = {path: base64.b64encode(content).decode() for path, content in program.files.items()}
        body = {"code": program.code, "argv": program.argv, "files": files, "wall": wall}
        found = self._exchange(body, program.stdin, wall + _SPARE_S)
        out, err = (base64.b64decode(found[key]).decode("utf-8", "replace") for key in ("out", "err"))
        ran = Ran(status=Status(found["how"]), code=found["code"], stdout=out, stderr=err, seconds=found["seconds"])
        return ran, bool(found["clean"])

    def kill(self) -> None:
        """End all its processes: they are of a PID namespace whose first process ends with bubblewrap. One that starts
        is ended when it has started: bubblewrap's child would else wait for it for ever."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            self._doomed = True
            if self._started:
                self._process.kill()

    def end(self) -> None:
        if self._config.kind != "bwrap":  # a container ends by itself, and removes what it keeps on the machine
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._process.stdin.close()
                self._process.wait(_ENDS_S)
        with contextlib.suppress(OSError):  # of one that did not start
            for child in () if self._started else _children(self._process.pid):
                os.kill(child, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        forget_container(self._command)
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):
                pipe.close()

    def _exchange(self, message: dict[str, Any], stdin: bytes, limit_s: float) -> dict[str, Any]:
        """The reply to a request. Raises SandboxLost where there is none within the limit."""
        body = json.dumps(message).encode()
        left = memoryview(struct.pack("<II", len(body), len(stdin)) + body + stdin)
        until, reply = time.monotonic() + limit_s, b""
        to, source = self._process.stdin.fileno(), self._process.stdout.fileno()
        poll = select.poll()
        poll.register(source, select.POLLIN)
        poll.register(to, select.POLLOUT)
        while True:
            ready = dict(poll.poll(max(until - time.monotonic(), 0) * 1000))
            if not ready:
                raise SandboxLost(f"no answer within {limit_s:g} s")
            if ready.get(to):
                try:
                    left = left[os.write(to, left) :]
                except BlockingIOError:
                    pass
                except OSError:
                    raise SandboxLost(self._why()) from None
                if not left:
                    poll.unregister(to)
            if ready.get(source):
                some = os.read(source, 1 << 16)
                if not some:
                    raise SandboxLost(self._why())
                reply += some
                size = struct.unpack("<I", reply[:4])[0] if len(reply) >= 4 else None
                if size is not None and size > _REPLY_BYTES:
                    raise SandboxLost(f"a reply of {size:,} bytes")
                if size is not None and len(reply) >= 4 + size:
                    return dict(parse_json(reply[4 : 4 + size]))

    def _why(self) -> str:
        """The last line of what it wrote as an error, or how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._errors.seek(max(self._errors.seek(0, os.SEEK_END) - 1000, 0))
        lines = self._errors.read().decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last[:200] or f"it ended with status {self._process.returncode}"


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

"""Compares mathematical expressions by the library math-verify, in a separate process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

from miles_like.rewards.maths.answers import gold
from miles_like.types import Prompt, Sample, Unscored


class MathVerify:
    """math-verify's equality of mathematical expressions, in a separate process with a time limit.

    A response is unscored when the comparison takes longer than `limit_s` or kills the process (out of memory, for
    example); the next call then starts another process. An instance belongs to one event loop and serializes its calls.
    """

    def __init__(self, *, limit_s: float = 10.0, start_limit_s: float = 120.0) -> None:
        self.limit_s = limit_s
        self._start_limit_s = start_limit_s
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def __call__(self, prompt: Prompt, sample: Sample) -> float | Unscored:
        """1 for an expression equal to the answer, else 0. Raises ValueError when the answer itself does not parse."""
        request = json.dumps({"gold": gold(prompt), "answer": sample.text, "limit_s": self.limit_s}).encode() + b"\n"
        async with self._lock:
            process = self._process or await self._start()
            # the process is reused only after it has replied: after a timeout or a cancelled call, its late reply would
            # be read as the reply to the next request
            self._process = None
            try:
                line = await self._exchange(process, request)
                self._process = process if line else None
            except TimeoutError:
                return Unscored(reason=f"math-verify needed more than {self.limit_s:g} s")
            finally:
                if self._process is None:
                    _kill(process)
        if not line:
            return Unscored(reason="the math-verify process died on it")
        reply: dict[str, object] = json.loads(line)
        if "error" in reply:
            raise ValueError(f"prompt {prompt.id!r}: {reply['error']}")
        return float(bool(reply["right"]))

    async def close(self) -> None:
        """End the process; a later call starts another one."""
        async with self._lock:
            if self._process is not None:
                _kill(self._process)
                await self._process.wait()
                self._process = None

    async def _start(self) -> asyncio.subprocess.Process:
        # -P keeps the script's folder off sys.path, where this file would hide the library math_verify
        worker = Path(__file__).with_name("math_worker.py")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(worker), str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        ready = b""
        try:
            async with asyncio.timeout(self._start_limit_s):
                ready = await process.stdout.readline()
        finally:
            if not ready:
                _kill(process)
        if not ready:
            raise RuntimeError("the math-verify process ended before it was ready: see its message on stderr")
        return process

    async def _exchange(self, process: asyncio.subprocess.Process, request: bytes) -> bytes:
        """The reply; empty where the process died."""
        assert process.stdin is not None and process.stdout is not None
        async with asyncio.timeout(self.limit_s):
            with contextlib.suppress(ConnectionError):
                process.stdin.write(request)
                await process.stdin.drain()
            return await process.stdout.readline()


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()

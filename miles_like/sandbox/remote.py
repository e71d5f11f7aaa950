"""A SandboxFusion server as a sandbox: POST /run_code (github.com/bytedance/SandboxFusion, sandbox/server/
sandbox_api.py and sandbox/runners/types.py at 53a6341)."""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
from typing import Any

import httpx

from miles_like.limits.regular_files import parse_json
from miles_like.sandbox.config import SandboxConfig
from miles_like.sandbox.program import Program, Ran, SandboxLost, Status
from rollout.server_url import tls

_PATH = "/run_code"
_SPARE_S = 30.0  # for the server's queue and the network
_REPLY_BYTES = 64 << 20
_RETRYABLE = (408, 429)


class RemoteSandbox:
    """Runs programs on a server. Limits of processor time, processes and files are the server's."""

    def __init__(self, config: SandboxConfig) -> None:
        assert config.url is not None, "SandboxConfig requires it"
        self._config, self._url = config, config.url.rstrip("/")
        self._loop: asyncio.AbstractEventLoop | None = None  # which the next two are of
        self._room = asyncio.Semaphore()
        self._http: httpx.AsyncClient | None = None

    async def run(self, program: Program) -> Ran:
        if self._loop is not (loop := asyncio.get_running_loop()):  # a check before the run had another one
            self._loop, self._room, self._http = loop, asyncio.Semaphore(self._config.slots or 64), None
        async with self._room:
            for attempt in range(self._config.retries + 1):
                if attempt:
                    await asyncio.sleep(min(2.0 ** (attempt - 1), 30.0))
                found = await self._ask(program)
                if isinstance(found, Ran):
                    return found
        raise SandboxLost(found)

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def _ask(self, program: Program) -> Ran | str:
        """The program's end, or why there is none this time."""
        wall = min(program.wall_s or self._config.wall_s, self._config.wall_s)
        if self._http is None:
            plain = {"Accept-Encoding": "identity"}  # a compressed reply may expand without bound
            self._http = httpx.AsyncClient(timeout=None, trust_env=False, headers=plain, verify=tls(self._url))
        try:
            async with asyncio.timeout(wall + _SPARE_S):
                async with self._http.stream("POST", self._url + _PATH, json=self._request(program, wall)) as reply:
                    if reply.status_code >= 500 or reply.status_code in _RETRYABLE:
                        return f"HTTP {reply.status_code} from {self._url}"
                    body = bytearray()
                    async for chunk in reply.aiter_bytes(1 << 16):
                        body += chunk
                        if len(body) > _REPLY_BYTES:
                            return f"{self._url} replied with more than {_REPLY_BYTES:,} bytes"
        except TimeoutError:
            return f"no reply from {self._url} within {wall + _SPARE_S:g} s"
        except httpx.TransportError as e:
            return f"no reply from {self._url}: {type(e).__name__}"
        if reply.status_code != 200:
            raise ValueError(
                f"{self._url}{_PATH} replied HTTP {reply.status_code}: {bytes(body[:200])!r}; check sandbox.url"
            )
        try:
            found = parse_json(bytes(body))
            return self._ran(found)
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(
                f"{self._url}{_PATH} replied {bytes(body[:200])!r}, which is no reply of SandboxFusion ({e}): check "
                "sandbox.url"
            ) from None

    def _request(self, program: Program, wall: float) -> dict[str, object]:
        code, language = program.code, "python"
        if program.argv:
            code, language = shlex.join(program.argv), "bash"
        return {
            "code": code,
            "language": language,
            "run_timeout": wall,
            "memory_limit_MB": self._config.memory_mb,
            "stdin": program.stdin.decode("utf-8", "replace"),
            "files": {path: base64.b64encode(content).decode() for path, content in program.files.items()},
        }

    def _ran(self, found: dict[str, Any]) -> Ran | str:
        result = found["run_result"]
        if found["status"] == "SandboxError" or result is None or result["status"] == "Error":
            return f"{self._url}: {str(found.get('message', ''))[:100] or 'an error of the sandbox'}"
        most = self._config.output_kb << 10
        out, err = ((result.get(key) or "") for key in ("stdout", "stderr"))
        seconds = float(result.get("execution_time") or 0.0)
        status, code = Status.EXIT, result.get("return_code")
        if result["status"] == "TimeLimitExceeded":
            status, code = Status.TIME, -1
        elif len(out.encode()) + len(err.encode()) > most:
            status, code = Status.OUTPUT, -1
        elif code and err.strip().rpartition("\n")[2].startswith("MemoryError"):
            status, code = Status.MEMORY, -1
        elif code is None:
            return f"{self._url} replied without a return code"
        elif code < 0 or code > 128:  # of a process, or of the shell around it
            status, code = Status.SIGNAL, -code if code < 0 else code - 128
        return Ran(status=status, code=int(code), stdout=out[:most], stderr=err[:most], seconds=seconds)


def health_of(config: SandboxConfig) -> None:
    """Raises ValueError where the server does not run a program."""
    sandbox = RemoteSandbox(config.model_copy(update={"retries": 0}))

    async def ask() -> Ran:
        try:
            return await sandbox.run(Program(code="print(6 * 7)"))
        finally:
            await sandbox.close()

    try:
        ran = asyncio.run(ask())
    except SandboxLost as e:
        raise ValueError(f"sandbox.url = {config.url!r} runs no program ({e}): start the server, or correct it") from e
    if ran.stdout.strip() != "42":
        raise ValueError(f"sandbox.url = {config.url!r} ran print(6 * 7) with the result {json.dumps(ran.stdout[:80])}")

"""What keys, limits and checks cost a rollout over HTTP, as a share of the server's processor time for a request.

Two figures of one run. `cost`: a request of the rollout is fed some thousand times to uvicorn's protocol with what is
added to it (bounds of the protocol, access, body limits) and to uvicorn's own without it, in this process; their
difference, and the whole time of the typed reading of the body, is divided by the processor time that the server spends
on such a request. It resolves microseconds. `cost_end_to_end`: two servers, with and without what is added, are asked
in turns; a machine that does other things moves it by more than the goal, so that no goal is held by it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import uvicorn
from figures import add_write, finish
from rollout_throughput import SAMPLES, Work, equal_work, make_model
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from rollout.embedded.server.access import Access
from rollout.embedded.server.limits import Arrivals, BodyLimits, BoundedProtocol, RequestLimits
from rollout.server_key import VARIABLE, ServerKey
from rollout.wire.endpoints import GENERATE
from rollout.wire.generate import GenerateRequest

GOALS = {"cost": 0.01}
PROMPTS_PER_REQUEST = 16
BARE = """
import sys
import uvicorn
from rollout.embedded import server
server.Access = lambda app, **_: app
server.BodyLimits = lambda app, limits: app
config = uvicorn.Config
uvicorn.Config = lambda app, **how: config(app, **(how | {"http": "httptools"}))
sys.exit(server.main(sys.argv[1:]))
"""


class Server:
    """A process that serves `path`, with or without what is measured."""

    def __init__(self, path: Path, *, bare: bool) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url, self.key = f"http://127.0.0.1:{port}", ServerKey.new()
        start = ["-c", BARE] if bare else ["-m", "rollout.embedded.server"]
        arguments = ["--model-path", str(path), "--port", str(port), "--threads", "1", "--enable-return-routed-experts"]
        environment = os.environ | {VARIABLE: self.key.text}
        self.process = subprocess.Popen([sys.executable, *start, *arguments], env=environment)

    def wait(self) -> None:
        until = time.monotonic() + 240
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if httpx.get(self.url + "/health", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        raise RuntimeError("the server did not come up")

    def cpu_s(self) -> float:
        """Processor time of all threads so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)


def seconds(server: Server, work: Work) -> tuple[float, float]:
    """Until every reply is read, and of the server's processor time."""
    before = server.cpu_s()
    wall = clocked(server, work)
    return wall, server.cpu_s() - before


def bodies_of(work: Work) -> list[bytes]:
    """JSON of every request."""
    specs = work.specs()
    parts = [specs[i : i + PROMPTS_PER_REQUEST] for i in range(0, len(specs), PROMPTS_PER_REQUEST)]
    return [
        orjson.dumps(
            GenerateRequest(
                input_ids=tuple(s.token_ids for s in part),
                sampling=tuple(s.sampling for s in part),
                n=part[0].n,
                ignore_eos=True,
                return_logprob=True,
                return_routed_experts=True,
            ).to_json()
        )
        for part in parts
    ]


class Wire(asyncio.Transport):
    """A transport whose other end reads everything at once."""

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    def close(self) -> None: ...

    def is_closing(self) -> bool:
        return False


async def _fed(body: bytes, times: int, *, bare: bool) -> float:
    """Processor seconds of this thread for the request to be read and answered by an application that does nothing."""
    key, done = ServerKey.new(), 0

    async def empty(scope: Any, receive: Any, send: Any) -> None:
        nonlocal done
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
        done += 1

    limits = RequestLimits(request_bytes=1 << 24, weights_bytes=1 << 28)
    app = empty if bare else Access(BodyLimits(empty, limits), host="127.0.0.1", address="127.0.0.1", key=key)
    config = uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False)
    config.load()
    kind = HttpToolsProtocol if bare else functools.partial(BoundedProtocol, arrivals=Arrivals(limits))
    protocol = kind(config, ServerState(), {})
    protocol.connection_made(Wire())
    lines = ["POST /generate HTTP/1.1", "host: 127.0.0.1:1", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in key.headers(GENERATE).items()]
    request = "\r\n".join([*lines, "", ""]).encode() + body
    began = time.thread_time()
    for i in range(times):
        protocol.data_received(request)
        while done <= i:
            await asyncio.sleep(0)
    seconds = time.thread_time() - began
    protocol.connection_lost(None)
    return seconds


def added_s(body: bytes, times: int = 2000) -> tuple[float, float]:
    """(seconds of the added layers, of the typed reading) for one request, medians of five."""
    layers, reading = [], []
    for _ in range(5):
        whole, bare = (asyncio.run(_fed(body, times, bare=bare)) / times for bare in (False, True))
        layers.append(whole - bare)
        value, began = orjson.loads(body), time.thread_time()
        for _ in range(times // 10):
            GenerateRequest.from_json(value)
        reading.append((time.thread_time() - began) / (times // 10))
    return statistics.median(layers), statistics.median(reading)


def clocked(server: Server, work: Work) -> float:
    """Until every reply is read."""

    async def send() -> float:
        headers = server.key.headers(GENERATE)
        async with httpx.AsyncClient(base_url=server.url, timeout=600, trust_env=False, headers=headers) as http:
            await http.get("/health")
            bodies = bodies_of(work)
            began = time.perf_counter()
            replies = await asyncio.gather(*(http.post(GENERATE, content=body) for body in bodies))
            tokens = sum(len(one["output_ids"]) for r in replies for one in r.raise_for_status().json())
            assert tokens == work.tokens, (tokens, work.tokens)
            return time.perf_counter() - began

    return asyncio.run(send())


def main() -> int:
    """0 when the goal holds."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="within a minute")
    add_write(p)
    args = p.parse_args()
    work, pairs = equal_work(32 if args.quick else 64, 16 if args.quick else 32), 16 if args.quick else 24
    with tempfile.TemporaryDirectory() as path:
        make_model(Path(path))
        servers = [Server(Path(path), bare=bare) for bare in (False, True)]
        try:
            for server in servers:
                server.wait()
                seconds(server, work)
            found: list[list[tuple[float, float]]] = []
            for i in range(pairs):  # the side that begins alternates
                turn = [seconds(s, work) for s in (servers if i % 2 else servers[::-1])]
                found.append(turn if i % 2 else turn[::-1])
        finally:
            for server in servers:
                server.stop()
    by_clock = statistics.median(whole[0] / bare[0] for whole, bare in found) - 1
    cpu = [sum(pair[i][1] for pair in found) for i in (0, 1)]
    bodies = bodies_of(work)
    a_request = cpu[0] / (pairs * len(bodies))
    layers, reading = added_s(bodies[0])
    cost = (layers + reading) / a_request
    rates = [work.tokens / statistics.median(pair[i][0] for pair in found) for i in (0, 1)]
    print(f"{len(work.prompts) * SAMPLES} samples, {work.tokens} tokens, {pairs} pairs")
    print(f"with keys and limits {rates[0]:.0f} tokens/s, without {rates[1]:.0f}: {by_clock:+.2%} (median of pairs)")
    print(f"processor time of the server {cpu[0]:.2f} s and {cpu[1]:.2f} s: {cpu[0] / cpu[1] - 1:+.2%}")
    print(
        f"of a request {1000 * a_request:.1f} ms, layers {1e6 * layers:.0f} us, reading {1e6 * reading:.0f}: {cost:.3%}"
    )
    figures = {"tokens_per_s": round(rates[0], 1), "bare_tokens_per_s": round(rates[1], 1)}
    figures |= {"request_ms": round(1000 * a_request, 2), "layers_us": round(1e6 * layers, 1)}
    figures |= {"reading_us": round(1e6 * reading, 1), "cost": round(cost, 5)}
    figures |= {"cost_end_to_end": round(cpu[0] / cpu[1] - 1, 4), "pairs": pairs}
    finish("server_limits", figures, {"cost_max": GOALS["cost"]}, cost < GOALS["cost"])
    return 0 if cost < GOALS["cost"] else 1


if __name__ == "__main__":
    sys.exit(main())

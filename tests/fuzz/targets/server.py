"""The embedded server under a storm of hostile requests, with one legitimate client beside them.

The hostile clients stand for other machines: they run in a separate process that gets only idle processor time
(SCHED_IDLE), so that what the legitimate client measures is the server and not the machine's other load. Quiet
latencies are measured before and after the storm.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.hostile import Maker, send
from tests.fuzz.served import Client, Served, served

CASES = 10_000
HALVES = 1500
_QUIET = 400  # legitimate requests of each quiet phase
_THREADS = 4  # hostile clients


def _storm(url: str, model: Path, where: Path, cases: int, seed: int) -> Counter[str]:
    """What became of the hostile requests. Runs in a separate process."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    make = Maker(model, where)

    def one(i: int) -> str:
        hostile = make.draw(random.Random(f"{seed}:{i}"))
        answer = send(url, hostile)
        if answer.status == -1:
            print(f"  case {i} ({hostile.kind}): no answer", file=sys.stderr, flush=True)
            return "hang"
        if answer.status in (0, -2):
            return "closed or left"
        if answer.status == 500:
            print(f"  case {i} ({hostile.kind}): {answer.text[:300]}", file=sys.stderr, flush=True)
            return "500"
        if answer.status >= 400 and not answer.is_sentence:
            print(f"  case {i} ({hostile.kind}): {answer.status} {answer.text[:300]!r}", file=sys.stderr, flush=True)
            return "no sentence"
        return "accepted" if answer.status < 400 else "refused"

    with ThreadPoolExecutor(_THREADS) as threads:
        return Counter(threads.map(one, range(cases)))


@contextlib.contextmanager
def _halves(at: Served, count: int) -> Iterator[list[socket.socket]]:
    """Connections that have each sent half a request."""
    found: list[socket.socket] = []
    try:
        for i in range(count):
            s = socket.create_connection(("127.0.0.1", at.port), 20)
            s.sendall((b"GET /health HTTP/1.1\r\n", b"POST /generate HTTP/1.1\r\nContent-Length: 50\r\n\r\n{")[i % 2])
            found.append(s)
        yield found
    finally:
        for s in found:
            s.close()


def _closed(waiting: list[socket.socket], seconds: float) -> int:
    """How many the server closes in that time."""
    until, open_ = time.monotonic() + seconds, list(waiting)
    while open_ and time.monotonic() < until:
        time.sleep(0.5)
        for s in list(open_):
            s.setblocking(False)
            try:
                if not s.recv(4096):
                    open_.remove(s)
            except BlockingIOError:
                continue
            except ConnectionError:
                open_.remove(s)
    return len(waiting) - len(open_)


def p(values: list[float], percent: float) -> float:
    """The percentile, in milliseconds."""
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _deaths(at: Served, over: threading.Event, found: list[float]) -> None:
    while not over.wait(1.0):
        if at.process.poll() is not None or not at.healthy():
            found.append(time.monotonic())


def run(cases: int, seed: int) -> dict[str, float | int | str]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, served(Path(folder)) as at:
        client = Client(at.url)
        client.some(100)  # the first ones find a cold server
        quiet, before = client.some(_QUIET), at.rss_mib
        over, deaths = threading.Event(), list[float]()
        watch = threading.Thread(target=_deaths, args=(at, over, deaths))
        watch.start()
        began = time.monotonic()
        with (
            ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as others,
            client.beside() as storm,
        ):
            counts = others.submit(_storm, at.url, at.path, Path(folder) / "bad", cases, seed).result()
        seconds = time.monotonic() - began
        with _halves(at, HALVES) as waiting, client.beside() as slow:
            closed = _closed(waiting, 45)
        over.set()
        watch.join()
        quiet += client.some(_QUIET)
        after, log = at.rss_mib, at.log.read_text(errors="replace")
    ratio = p(storm, 99) / p(quiet, 99)
    wrong = len(deaths) + counts["hang"] + counts["500"] + counts["no sentence"] + client.wrong + client.failed
    return {
        "hostile requests": cases,
        "seconds of the storm": round(seconds),
        **{kind: counts[kind] for kind in ("refused", "accepted", "closed or left")},
        "deaths": len(deaths),
        "hangs": counts["hang"],
        "answers of 500": counts["500"],
        "refusals without a sentence": counts["no sentence"],
        "legitimate answers": client.asked,
        "wrong answers": client.wrong,
        "legitimate requests that failed": client.failed,
        "quiet p50, ms": round(1000 * statistics.median(quiet), 1),
        "quiet p99, ms": round(p(quiet, 99), 1),
        "storm p50, ms": round(1000 * statistics.median(storm), 1),
        "storm p99, ms": round(p(storm, 99), 1),
        "storm p99 / quiet p99": round(ratio, 2),
        "half requests": HALVES,
        "half requests closed by the server": closed,
        "p99 beside half requests, ms": round(p(slow, 99), 1),
        "memory before, MiB": round(before),
        "memory after, MiB": round(after),
        "log, bytes": len(log),
        "tracebacks in the log": log.count("Traceback"),
        "failures": wrong + (HALVES - closed) + log.count("Traceback"),
    }

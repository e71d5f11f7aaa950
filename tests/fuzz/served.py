"""A server process of a tiny model for fuzzing, and a legitimate client whose right answers are known."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.spawn import free_port
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

MODEL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
}
CONTEXT = 128
TOKENIZER = Path(__file__).parents[2] / "configs" / "tiny" / "tokenizer.json"


def model(where: Path) -> Path:
    hf = tiny(**MODEL)
    write_checkpoint(where, hf, random_tensors(hf))
    shutil.copy2(TOKENIZER, where / "tokenizer.json")
    return where


@dataclass(frozen=True)
class Served:
    url: str
    path: Path
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def rss_mib(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / (1 << 20)

    def healthy(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=20, trust_env=False).status_code == 200
        return False


@contextlib.contextmanager
def served(where: Path, *more: str) -> Iterator[Served]:
    """A server of `model` in `where`, once it answers."""
    path, port, log = model(where / "hf"), free_port(), where / "server.log"
    command = [sys.executable, "-m", "rollout.embedded.server", "--model-path", str(path), "--port", str(port)]
    command += ["--threads", "1", "--context-length", str(CONTEXT), "--enable-return-routed-experts", *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--weight-version", "0"], stdout=out, stderr=out, env=environment)
    at = Served(f"http://127.0.0.1:{port}", path, log, process)
    try:
        until = time.monotonic() + 120
        while not at.healthy():
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield at
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def legitimate(number: int) -> dict[str, Any]:
    """One of eight requests; its answer is a function of its seed."""
    seed = number % 8
    params = {"max_new_tokens": 12, "sampling_seed": seed, "ignore_eos": True, "n": 1 + seed % 3}
    ids = [[5 + seed, 9, 33, 2], [7, 8, seed]] if seed % 2 else [5 + seed, 9, 33, 2]
    rid = f"client-{number}"
    return {
        "input_ids": ids,
        "sampling_params": params,
        "rid": [rid, f"{rid}b"] if seed % 2 else rid,
        "return_logprob": True,
        "return_routed_experts": True,
    }


def tokens(answer: Any) -> list[list[int]]:
    return [one["output_ids"] for one in (answer if isinstance(answer, list) else [answer])]


@dataclass
class Client:
    """Asks again and again, and compares what comes with the answers of a quiet server."""

    url: str
    right: dict[int, list[list[int]]] = field(default_factory=dict)
    wrong: int = 0
    failed: int = 0
    asked: int = 0

    def ask(self, http: httpx.Client) -> float:
        """Seconds."""
        number, began = self.asked, time.perf_counter()
        self.asked += 1
        try:
            reply = http.post("/generate", content=json.dumps(legitimate(number)), timeout=60)
            seconds = time.perf_counter() - began
            got = tokens(reply.json()) if reply.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            self.failed += 1
            return time.perf_counter() - began
        if got is None:
            self.failed += 1
        elif self.right.setdefault(number % 8, got) != got:
            self.wrong += 1
        return seconds

    def some(self, count: int) -> list[float]:
        with httpx.Client(base_url=self.url, trust_env=False) as http:
            return [self.ask(http) for _ in range(count)]

    @contextlib.contextmanager
    def beside(self) -> Iterator[list[float]]:
        """Asks until the block ends; the list holds the seconds of each answer."""
        found: list[float] = []
        over = threading.Event()

        def run() -> None:
            with httpx.Client(base_url=self.url, trust_env=False) as http:
                while not over.is_set():
                    found.append(self.ask(http))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield found
        finally:
            over.set()
            thread.join(120)

"""Follows a page of docs/ as a reader does: writes its titled blocks, and runs its commands, in order."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.support.installed import environment_without_checkout
from tests.support.pages import ROOT, Block

LIMIT_S = 900.0  # of one command


class Reader:
    """Follows a page in a directory. python: of an environment that has the package installed; None: the checkout's
    package, and its configs in the directory."""

    def __init__(self, home: Path, python: Path | None = None) -> None:
        self.home = home
        self.servers: list[subprocess.Popen[bytes]] = []
        self.seconds: list[tuple[str, float]] = []  # of each command that was waited for, in order
        if python is None:
            self._programs = {"miles-like": [sys.executable, "-m", "miles_like"], "python": [sys.executable]}
            self.environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            if not (home / "configs").is_symlink():
                (home / "configs").symlink_to(ROOT / "configs")
        else:
            self._programs = {"miles-like": [str(python.parent / "miles-like")], "python": [str(python)]}
            self.environment = environment_without_checkout()
        self.environment["COLUMNS"] = "200"

    def follow(self, block: Block) -> None:
        if block.title:
            file = self.home / block.title
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text)
        elif block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                self.run(line, background="background" in block.info)

    def run(self, line: str, *, background: bool) -> None:
        words = shlex.split(line)
        if words[0] == "curl":
            self.request(words)
            return
        words = [*self._programs.get(words[0], [words[0]]), *words[1:]]
        if background:
            self.servers.append(subprocess.Popen(words, cwd=self.home, env=self.environment))
            return
        began = time.monotonic()
        done = subprocess.run(
            words, cwd=self.home, env=self.environment, timeout=LIMIT_S, capture_output=True, text=True
        )
        self.seconds.append((line, time.monotonic() - began))
        print(f"$ {line}\n{done.stdout}{done.stderr}")
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"

    def request(self, words: list[str]) -> None:
        (url,) = (word for word in words if word.startswith("http"))
        body = words[words.index("-d") + 1].encode()
        for _ in range(120):
            try:
                sent = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
                with urllib.request.urlopen(sent, timeout=60) as reply:
                    print(reply.read().decode())
                return
            except OSError:  # it is still starting
                time.sleep(1.0)
        raise AssertionError(f"{url} does not answer")

    def metrics(self, run: str) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.home / "runs" / run / "metrics.jsonl").read_text().splitlines()]

    def close(self) -> None:
        for server in self.servers:
            server.terminate()
            server.wait(60)


def mean(rows: list[dict[str, float]], key: str) -> float:
    """Of a metric over rows of metrics.jsonl."""
    return sum(row[key] for row in rows) / len(rows)

"""The tutorials, command by command, as a reader runs them with the installed package and without a checkout: every
block of their pages, in order. Of the other pages the commands that need no other machine, on tiny models with one
step, in the checkout.

Why it must hold: the tutorial is the first thing that is tried. What is asserted beside "every command succeeds" is
what the page promises: the reward rises. Not covered: figures of the pages; `curl`, in whose place Python sends the
request.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.installed import environment_without_checkout
from tests.support.pages import PAGES, ROOT, Block, blocks, commands

LIMIT_S = 900.0  # of one command
pytestmark = [pytest.mark.slow, pytest.mark.long(beside="tests/docs_pages/test_docs_snippets.py")]


class Reader:
    """Follows a page in a directory. programs: what the first word of a command stands for."""

    def __init__(self, home: Path, programs: Mapping[str, list[str]], variables: Mapping[str, str]) -> None:
        self.home, self.programs = home, programs
        self.servers: list[subprocess.Popen[bytes]] = []
        self.environment = {**variables, "COLUMNS": "200"}

    def follow(self, block: Block) -> None:
        if block.title:
            file = self.home / block.title
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text)
        elif block.language == "bash":
            for line in block.text.splitlines():
                self.run(line, background="background" in block.info)

    def run(self, line: str, *, background: bool) -> None:
        words = shlex.split(line)
        if words[0] == "curl":
            self.request(words)
            return
        words = [*self.programs.get(words[0], [words[0]]), *words[1:]]
        if background:
            self.servers.append(subprocess.Popen(words, cwd=self.home, env=self.environment))
            return
        done = subprocess.run(
            words, cwd=self.home, env=self.environment, timeout=LIMIT_S, capture_output=True, text=True
        )
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


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """In a checkout."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    programs = {"miles-like": [sys.executable, "-m", "miles_like"], "python": [sys.executable]}
    one = Reader(tmp_path, programs, os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    yield one
    one.close()


@pytest.fixture
def user(python: Path, tmp_path: Path) -> Iterator[Reader]:
    """With the installed package, in an empty directory."""
    programs = {"miles-like": [str(python.parent / "miles-like")], "python": [str(python)]}
    one = Reader(tmp_path, programs, environment_without_checkout())
    yield one
    one.close()


def mean(rows: list[dict[str, float]], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def test_the_first_tutorial(user: Reader) -> None:
    page = ROOT / "docs" / "start" / "tutorial.md"
    for block in blocks(page):
        user.follow(block)
    rows = user.metrics("mine")
    assert rows[-1]["step"] == 45  # of the resumed run
    assert mean(rows[-5:], "rollout/reward/right/mean") > mean(rows[1:6], "rollout/reward/right/mean") + 0.1
    assert len(re.findall(r"```toml.*?```", page.read_text(), re.DOTALL)[0].splitlines()) <= 14


def test_the_tutorial_with_a_tool(user: Reader) -> None:
    for block in blocks(ROOT / "docs" / "start" / "tool_tutorial.md"):
        user.follow(block)
    rows = user.metrics("tool")
    first, last = rows[1:6], rows[-5:]
    assert mean(last, "rollout/reward/called/mean") > mean(first, "rollout/reward/called/mean") + 0.2
    assert mean(last, "rollout/reward/mean") > mean(first, "rollout/reward/mean") + 0.2


TINY, LARGE = "configs/tiny.toml", "configs/qwen3_30b_a3b.toml"
ELSEWHERE = ("/opt/", "HEAD:", "http", "org/", "--key-file", "HF_DIR", "MEGATRON_DIR", "FILE", "DIR", "sglang")
FEW = ("train.steps=1", "train.groups_per_step=8", "model.make.max_steps=2", "model.make.check_every=1")


def named(words: list[str]) -> str:
    """With a configuration in the place of CONFIG: one for GPUs where nothing is started."""
    config = LARGE if words[1] in ("plan", "simulate") else TINY
    return " ".join({"CONFIG": config, "RUN": "runs/other"}.get(word, word) for word in words)


def of_other_pages() -> list[str]:
    """Commands that the pages show with values, each once."""
    found = []
    for page in PAGES:
        if page.parent.name in ("recipes", "start") or page.parent == ROOT:
            continue
        for block in blocks(page):
            if "[--" not in block.text:
                found += [named(one.split()) for one in commands(block.text)]
    return [one for one in dict.fromkeys(found) if not any(word in one for word in ELSEWHERE)]


def test_commands_of_the_other_pages(reader: Reader) -> None:
    lines = of_other_pages()
    programs = {" ".join(line.split()[1:2]) for line in lines}
    assert {"train", "plan", "simulate", "doctor", "verify"} <= programs
    few = "".join(f" --set {setting}" for setting in FEW)
    demo = f"miles-like train configs/tiny.toml --run-dir runs/demo{few} --set train.steps=6"  # `simulate` reads five
    reader.run(demo, background=False)
    for line in lines:
        small = few if line.startswith("miles-like train") else ""
        if "tiny_opd" in line:
            small += " --set distillation.teachers.clean.make.max_steps=2"
        if line.startswith("miles-like verify"):
            small = " --prompts 4 --set model.make.max_steps=2 --set model.make.check_every=1"
        reader.run(f"{line}{small}", background=False)

"""The tutorials, command by command, as a reader runs them with the installed package and without a checkout: every
block of their pages, in order. Of the other pages the commands that need no other machine, on tiny models with one
step, in the checkout.

Why it must hold: the tutorial is the first thing that is tried. What is asserted beside "every command succeeds" is
what the page promises: the reward rises. Not covered: figures of the pages; `curl`, in whose place Python sends the
request.
"""

from __future__ import annotations

import re

import pytest

from tests.support.pages import PAGES, ROOT, blocks, commands
from tests.support.reader import Reader, mean

pytestmark = [pytest.mark.slow, pytest.mark.long(beside="tests/docs_pages/test_docs_snippets.py")]


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
ELSEWHERE += (
    "miles-like serve",
    "OWNER/",
    "runs/mine",
    "answers.jsonl",
    "pairs_heldout.jsonl",
)  # other tests run them
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
    for name, source in {"raw": "train", "aime": "heldout"}.items():
        rows = (ROOT / "configs" / "tiny" / f"{source}.jsonl").read_text().splitlines(keepends=True)
        (reader.home / f"{name}.jsonl").write_text("".join(rows[:200]))
    for line in lines:
        small = few if line.startswith("miles-like train") else ""
        if "tiny_opd" in line:
            small += " --set distillation.teachers.clean.make.max_steps=2"
        if line.startswith("miles-like verify"):
            small = " --prompts 4 --set model.make.max_steps=2 --set model.make.check_every=1"
        reader.run(f"{line}{small}", background=False)

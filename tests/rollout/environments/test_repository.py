"""The environment over a repository with a bug: 20 repositories, their corrections, and the ends of episodes.

Not covered: a policy (tests/laws/test_episodes.py runs environments with one).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from miles_like.rewards.answered import answered_sample
from miles_like.sandbox import make
from miles_like.sandbox.config import SandboxConfig
from miles_like.sandbox.pool import SandboxPool
from miles_like.sandbox.program import Program, Ran, SandboxLost
from miles_like.types import EnvironmentLost, Observation, Prompt
from rollout.environments import repository
from rollout.environments.repository import Repository
from tests.support.debian import need_programs
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[2] / "data" / "repositories.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text().splitlines()]


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> Iterator[None]:
    need_programs("bwrap", "setpriv")
    make.use_sandbox(config := SandboxConfig(kind="bwrap", slots=2, wall_s=2, cpu_s=1, memory_mb=256))
    yield
    pool = make._shared.pop(config)
    assert isinstance(pool, SandboxPool)
    pool.end()
    make.use_sandbox(SandboxConfig())


def episode(row: dict[str, Any], turns: Sequence[str]) -> tuple[list[Observation], Repository]:
    prompt = Prompt(id=row["id"], token_ids=(1,), answer="", meta=row)
    environment = Repository(prompt, seed=0)
    sample = answered_sample(prompt, 0, [2], "")

    async def play() -> list[Observation]:
        return [await environment(sample, turn) for turn in turns]

    return asyncio.run(play()), environment


def edit(path: str, old: str, new: str) -> str:
    return f'I correct it. <edit path="{path}">\n<<<<\n{old}====\n{new}>>>>\n</edit>'


def correction(row: dict[str, Any]) -> str:
    return edit(row["broken"], row["files"][row["broken"]], row["fixed"])


def test_every_repository_fails_and_its_correction_passes() -> None:
    assert len(ROWS) == 20
    for row in ROWS:
        (before, changed, after, end), one = episode(row, ["<test/>", correction(row), "<test/>", "<submit/>"])
        assert "FAILED" in before.text and "is changed" in changed.text and "FAILED" not in after.text, row["id"]
        assert (end.ends, end.reward, one.outcome) == (True, 1.0, "solved"), row["id"]


def test_kinds_of_failure() -> None:
    row = next(r for r in ROWS if r["broken"] != "report.py")
    other = next(path for path in row["files"] if path not in (row["broken"], "report.py", "README.md"))
    body = row["files"][other]
    wrong = body.replace("return ", "return None and ", 1) if "return " in body else body + "\n"
    cases = {
        "unchanged": [],
        "failing": [edit("README.md", "", "").replace("<<<<\n", f"<<<<\n{row['files']['README.md']}")],
        "regression": [edit(other, body, wrong)],
        "broken": [edit(path, text, "1 / 0\n") for path, text in row["files"].items() if path.endswith(".py")],
    }
    for kind, turns in cases.items():
        before = Repository.outcomes[kind]
        found, one = episode(row, [*turns, "<submit/>"])
        assert (found[-1].reward, one.outcome, Repository.outcomes[kind] - before) == (0.0, kind, 1), kind


def test_hacks_of_the_tests_fail() -> None:
    row = ROWS[0]
    path = next(iter(row["tests"]))
    hack = "import os, sys\nos._exit(0)\n"
    turns = [
        edit(path, row["tests"][path], "def test_it(): pass\n"),
        edit("tests/conftest.py", "", hack),
        edit("conftest.py", "", hack),
        edit("sitecustomize.py", "", hack),
        edit("../x.py", "", hack),
        edit(row["broken"], row["files"][row["broken"]], hack),
        "<test/>",
        "<submit/>",
    ]
    found, one = episode(row, turns)
    assert found[-1].reward == 0.0 and one.refused == {"tests": 2, "path": 1}
    assert "0 of" in found[-2].text and one.outcome == "broken"


def test_a_path_that_cannot_be_written_is_refused() -> None:
    """Else the sandbox, and with it the episode, would be lost by what the policy wrote."""
    row = ROWS[0]
    path, text = row["broken"], row["files"][row["broken"]]
    names = [f"{path}/x.py", "a/b.py", "a", "x" * 256 + ".py", "y/" * 600, "./tests/new.py"]
    found, one = episode(row, [*(edit(name, "", "y = 1\n") for name in names), edit(f"./{path}", text, row["fixed"])])
    assert "is changed" in found[1].text and one.refused == {"path": 4, "tests": 1}
    assert one.files == {**row["files"], "a/b.py": "y = 1\n", path: row["fixed"]}
    found, one = episode(row, [edit(names[0], "", "y = 1\n"), edit(f"./{path}", text, row["fixed"]), "<submit/>"])
    assert (found[-1].reward, one.outcome) == (1.0, "solved")


def test_what_a_policy_may_say() -> None:
    row = ROWS[0]
    path = row["broken"]
    found, one = episode(
        row,
        [
            "I do not know",
            f"<read>{path}</read>",
            "<read>tests/no.py</read>",
            f'<edit path="{path}">no form</edit>',
            edit(path, "these lines are not there\n", ""),
            edit("no.py", "a\n", "b\n"),
            edit("big.py", "", "x" * (1 << 20) + "\n"),
            f"<think><submit/></think><read>{path}</read>",
        ],
    )
    assert [one.ends for one in found] == [False] * 8 and one.files == row["files"]
    assert repository.FORMAT in found[0].text and row["files"][path] in found[1].text
    assert path in found[2].text and found[7].text == found[1].text
    assert one.refused == {"form": 1, "lines": 1, "file": 1, "size": 1}


def test_a_lost_sandbox_is_a_lost_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        async def run(self, program: Program) -> Ran:
            raise SandboxLost("it ended")

    monkeypatch.setattr(repository, "shared_sandbox", Lost)
    with refuses(EnvironmentLost, "lost", "ended"):
        episode(ROWS[0], ["<test/>"])
    with refuses(ValueError, "'files'", "'a'"):
        Repository(Prompt(id="a", token_ids=(1,), answer=""), seed=0)

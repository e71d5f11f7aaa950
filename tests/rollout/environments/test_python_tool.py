"""The Python tool: what a model is shown of a program."""

from __future__ import annotations

import asyncio

import pytest

from miles_like.sandbox.program import Program, Ran, SandboxLost, Status
from miles_like.types import EnvironmentLost
from rollout.environments import python_tool
from rollout.environments.python_tool import answer_of, python, shortened
from tests.support.refusals import refuses


def ran(status: Status = Status.EXIT, code: int = 0, out: str = "", err: str = "") -> Ran:
    return Ran(status=status, code=code, stdout=out, stderr=err, seconds=0.1)


def test_what_is_shown() -> None:
    assert answer_of(ran(out="1\n")) == "1" and answer_of(ran()) == "(no output)"
    assert answer_of(ran(code=1, out="a\n", err="ValueError: b\n")) == "a\nValueError: b"
    assert answer_of(ran(code=3)) == "The program ended with status 3."
    assert "signal 11" in answer_of(ran(Status.SIGNAL, 11))
    for status, word in ((Status.TIME, "time"), (Status.MEMORY, "memory"), (Status.OUTPUT, "much")):
        assert word in answer_of(ran(status, -1, out="x")) and answer_of(ran(status, -1, out="x")).startswith("x\n")


def test_a_long_output_loses_its_middle() -> None:
    text = shortened("a" * 5000 + "b" * 5000)
    assert len(text) < 4100 and text.startswith("aaa") and text.endswith("bbb") and "6000 characters" in text


def test_a_call_runs_in_the_sandbox_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Box:
        async def run(self, program: Program) -> Ran:
            if program.code == "lost":
                raise SandboxLost("it ended")
            return ran(out=program.code)

    monkeypatch.setattr(python_tool, "shared_sandbox", Box)
    assert asyncio.run(python("print(1)")) == "print(1)"
    with refuses(EnvironmentLost, "ended"):
        asyncio.run(python("lost"))

"""The reward unit_tests: which block is the program, parts, and what leaves a sample without a score."""

from __future__ import annotations

import asyncio

import pytest

from miles_like.config.sections.reward import RewardConfig
from miles_like.rewards import unit_tests
from miles_like.rewards.answered import answered_sample
from miles_like.rewards.load import make_reward
from miles_like.rewards.unit_tests import program_of
from miles_like.sandbox.config import SandboxConfig
from miles_like.sandbox.program import Program, Ran, SandboxLost
from miles_like.types import Prompt, Score, Unscored
from tests.support.debian import need_programs
from tests.support.refusals import refuses

SANDBOX = SandboxConfig(kind="bwrap", slots=1, wall_s=2)
TESTS = ["assert double(1) == 2", "assert double(2) == 4"]
HALF = "def double(n): return 2"


def scored(response: str, tests: object = TESTS, **options: object) -> Score | Unscored:
    prompt = Prompt(id="a", token_ids=(1,), answer="", meta={"tests": tests})  # type: ignore[dict-item]
    config = RewardConfig.model_validate({"name": "unit_tests", "unit_tests": options, "retries": 0})
    reward = make_reward(config, sandbox=SANDBOX)
    assert reward.slow and reward.compares is None

    async def ask() -> Score | Unscored:
        (found,) = await reward([prompt], [answered_sample(prompt, 0, [2], response)])
        await reward.close()
        return found

    return asyncio.run(ask())


def block(code: str) -> str:
    return f"```python\n{code}\n```\n"


@pytest.mark.slow
def test_parts_and_the_value() -> None:
    need_programs("bwrap", "setpriv")
    right = block("def double(n): return 2 * n")
    assert scored(right) == Score(value=1.0, parts={"passed": 1.0, "program": 1.0, "limits": 0.0})
    assert scored(block(HALF)) == Score(value=0.0, parts={"passed": 0.5, "program": 1.0, "limits": 0.0})
    assert scored(block(HALF), count="share") == Score(value=0.5, parts={"passed": 0.5, "program": 1.0, "limits": 0.0})
    assert scored(HALF, fenced=False).parts["passed"] == 0.5  # type: ignore[union-attr]
    ended = scored(block("def double(n):\n    while True: pass"))
    assert ended == Score(value=0.0, parts={"passed": 0.0, "program": 1.0, "limits": 1.0})


@pytest.mark.slow
def test_several_answers_are_no_better_than_the_last() -> None:
    need_programs("bwrap", "setpriv")
    right, wrong = block("def double(n): return 2 * n"), block(HALF)
    assert scored(right + "or\n" + wrong).value == 0.0  # type: ignore[union-attr]
    assert scored(f"<think>{right}</think> I do not know").value == 0.0  # type: ignore[union-attr]
    assert scored(f"<think>{wrong}</think>{right}").value == 1.0  # type: ignore[union-attr]


def test_which_block_is_the_program() -> None:
    assert program_of("```python\na\n```\ntext\n```py\nb\n```") == "b\n"
    assert program_of("```\na\n```") == "a\n"
    assert program_of("```bash\nrm\n```") is None and program_of("a = 1") is None
    assert program_of("```python\na") is None, "a block that was cut"


def test_a_lost_sandbox_leaves_the_sample_without_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        async def run(self, program: Program) -> Ran:
            raise SandboxLost("it ended")

    monkeypatch.setattr(unit_tests, "shared_sandbox", lambda config: Lost())
    monkeypatch.setattr(unit_tests, "check_installed", lambda config: None)
    assert scored(block(HALF)) == Unscored(reason="the sandbox was lost: it ended")


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(ValueError, "sandbox.kind"):
        make_reward(RewardConfig(name="unit_tests"))
    monkeypatch.setattr(unit_tests, "check_installed", lambda config: None)
    prompt = Prompt(id="a", token_ids=(1,), answer="")
    reward = make_reward(RewardConfig(name="unit_tests"), sandbox=SANDBOX)
    with refuses(RuntimeError, "'tests'", "reward.unit_tests.tests_key"):
        asyncio.run(reward([prompt], [answered_sample(prompt, 0, [2], "a")]))

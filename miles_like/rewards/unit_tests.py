"""The reward `unit_tests`: the tests of the prompt's row that the program in the response passes."""

from __future__ import annotations

import re

from miles_like.config.sections.reward import UnitTestsConfig
from miles_like.sandbox.config import SandboxConfig
from miles_like.sandbox.judging import judge, read_tests
from miles_like.sandbox.make import check_installed, shared_sandbox
from miles_like.sandbox.program import SandboxLost, Status
from miles_like.types import Prompt, Sample, Score, Unscored

# the lines between ``` or ```python and ```; a fence of another language is no program
_BLOCK = re.compile(r"^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE | re.I)
_THOUGHT = "</think>"


def program_of(response: str) -> str | None:
    """The last fenced block of Python after the reasoning; None: there is none. An earlier block does not count, so
    that several answers are no better than the last."""
    found = _BLOCK.findall(response.rpartition(_THOUGHT)[2])
    return str(found[-1]) if found else None


class UnitTests:
    """1 when all tests pass, or the share that passes. Parts: `passed`, the share; `program`, 0 for a response without
    one; `limits`, the runs that a limit or a signal ended."""

    def __init__(self, config: UnitTestsConfig, sandbox: SandboxConfig) -> None:
        """Raises ValueError where no sandbox is configured, or its program is not installed."""
        check_installed(sandbox)
        self._config, self._sandbox = config, sandbox

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score | Unscored:
        """Raises ValueError for a row without tests."""
        c = self._config
        if c.tests_key not in prompt.meta:
            raise ValueError(f"the row has no column {c.tests_key!r} (reward.unit_tests.tests_key)")
        tests = read_tests(prompt.meta[c.tests_key], str(prompt.meta.get(c.entry_key) or ""))
        code = program_of(sample.text) if c.fenced else sample.text
        if code is None:
            return Score(value=0.0, parts={"passed": 0.0, "program": 0.0, "limits": 0.0})
        try:
            found = await judge(shared_sandbox(self._sandbox), code, tests, until_failure=c.count == "all")
        except SandboxLost as e:
            return Unscored(reason=f"the sandbox was lost: {e}")
        limits = float(sum(n for status, n in found.ended.items() if status is not Status.EXIT))
        value = found.share if c.count == "share" else float(found.passed == found.tests)
        return Score(value=value, parts={"passed": found.share, "program": 1.0, "limits": limits})

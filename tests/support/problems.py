"""The 60 programming problems of tests/data/programming_problems.jsonl: a prompt, tests, a solution that passes them,
and mutants of it that do not."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Problem:
    id: str
    prompt: str
    tests: Any  # as of a row of prompts
    solution: str
    mutants: Sequence[str]
    entry_point: str = ""


def problems() -> list[Problem]:
    text = (DATA / "programming_problems.jsonl").read_text(encoding="utf-8")
    return [Problem(**json.loads(line)) for line in text.splitlines()]


def hacks() -> dict[str, str]:
    """Name -> a program that tries to pass tests of `double` without computing it."""
    found = re.split(r"^### (.*)\n", (DATA / "unit_test_hacks.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))

"""The bounded tier of tests/fuzz/targets/prompts.py."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.bounded import check_corpus, drawn
from tests.fuzz.targets import prompts


def test_kept_cases(tmp_path: Path) -> None:
    check_corpus("prompts", prompts, tmp_path)


def test_drawn_cases(tmp_path: Path) -> None:
    drawn(prompts, tmp_path, examples=40)()

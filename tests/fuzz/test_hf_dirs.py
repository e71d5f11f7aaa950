"""The bounded tier of tests/fuzz/targets/hf_dirs.py."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.bounded import check_corpus, drawn
from tests.fuzz.targets import hf_dirs


def test_kept_cases(tmp_path: Path) -> None:
    check_corpus("hf_dirs", hf_dirs, tmp_path)


def test_drawn_cases(tmp_path: Path) -> None:
    drawn(hf_dirs, tmp_path, examples=25)()

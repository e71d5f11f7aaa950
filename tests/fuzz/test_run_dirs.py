"""The bounded tier of tests/fuzz/targets/run_dirs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.bounded import check_corpus, drawn
from tests.fuzz.targets import run_dirs


def test_kept_cases(tmp_path: Path) -> None:
    check_corpus("run_dirs", run_dirs, tmp_path)


@pytest.mark.slow
def test_drawn_cases(tmp_path: Path) -> None:
    drawn(run_dirs, tmp_path, examples=25)()

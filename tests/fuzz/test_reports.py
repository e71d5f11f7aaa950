"""The bounded tier of tests/fuzz/targets/reports.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.bounded import check_corpus, drawn
from tests.fuzz.targets import reports


def test_kept_cases(tmp_path: Path) -> None:
    check_corpus("reports", reports, tmp_path)


@pytest.mark.slow
def test_drawn_cases(tmp_path: Path) -> None:
    drawn(reports, tmp_path, examples=2)()

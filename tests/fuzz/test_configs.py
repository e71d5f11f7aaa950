"""No changed configuration ends a dry run in a traceback or without an end."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.bounded import check_corpus, drawn
from tests.fuzz.targets import configs


def test_kept_configurations(tmp_path: Path) -> None:
    check_corpus("configs", configs, tmp_path)


def test_drawn_configurations(tmp_path: Path) -> None:
    drawn(configs, tmp_path, examples=25)()

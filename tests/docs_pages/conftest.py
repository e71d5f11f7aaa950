"""Readers of pages, each in an empty directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.reader import Reader


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """With the checkout."""
    one = Reader(tmp_path)
    yield one
    one.close()


@pytest.fixture
def user(python: Path, tmp_path: Path) -> Iterator[Reader]:
    """With the installed package, without a checkout."""
    one = Reader(tmp_path, python)
    yield one
    one.close()

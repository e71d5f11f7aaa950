"""A reader of pages, in an empty directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.reader import Reader


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    one = Reader(tmp_path)
    yield one
    one.close()

"""What a dry run finds of SGLang in this interpreter: the version that its package's metadata has."""

from __future__ import annotations

from pathlib import Path

import pytest

VERSION = "0.5.23"


def install(monkeypatch: pytest.MonkeyPatch, where: Path) -> None:
    """The metadata of a package without code, in `where`, which the test's interpreter finds."""
    info = where / f"sglang-{VERSION}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {VERSION}\n")
    monkeypatch.syspath_prepend(where)

"""Where a rendered launch goes."""

from __future__ import annotations

import os
from pathlib import Path


def check_output(path: Path | None, *, overwrite: bool) -> None:
    """Raises ValueError, before anything is rendered, for a file that exists or cannot be there."""
    if path is None:
        if overwrite:
            raise ValueError("--overwrite has no effect without --out: add --out FILE")
        return
    if path.is_dir():
        raise ValueError(f"--out {path} is a directory: name a file in it")
    if path.exists() and not overwrite:
        raise ValueError(f"--out {path} exists: pass --overwrite to replace it, or another file")
    if not path.parent.is_dir():
        raise ValueError(f"--out {path}: there is no directory {path.parent}: make it first")


def write_output(path: Path, text: str) -> None:
    """Whole or not at all. Raises OSError."""
    made = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        made.write_text(text, encoding="utf-8")
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)

"""Durable, verified files of a checkpoint folder.

The manifest has the size of every file and the SHA-256 of those that the driver writes or that are small. The driver
does not read the ranks' large files: their checksums are in a separate file
(megatron_bridge/weights/checkpoint_sums.py), whose SHA-256 is in the manifest, and each rank verifies a share of them
before it loads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from miles_like.hf.checkpoint import sync_path
from miles_like.limits.regular_files import check_inside, is_inner_name
from miles_like.storage.completion import file_sha256

SMALL = 1 << 20  # bytes: reading a rank's file up to this size again costs nothing


class DamagedError(ValueError):
    """A checkpoint differs from what was written."""


class SavedFile(TypedDict):
    """An entry of the manifest."""

    bytes: int
    sha256: str | None  # None for large files in subfolders


def file_facts(folder: Path, *, but: str) -> dict[str, SavedFile]:
    """An entry for each file below `folder` except `but`, keyed by its relative path."""
    out: dict[str, SavedFile] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name, size = path.relative_to(folder).as_posix(), path.stat().st_size
        if name != but and not name.endswith(".tmp"):  # left by a writer that was killed
            hashed = path.parent == folder or size <= SMALL
            out[name] = {"bytes": size, "sha256": file_sha256(path) if hashed else None}
    return out


def check_files(folder: Path, facts: Mapping[str, SavedFile]) -> None:
    """Raises DamagedError naming the first file that is missing, has another size, or another SHA-256 if one is given.

    Sizes are checked first: they cost nothing, and the message then names the truncated file as truncated.
    """
    broken = f"checkpoint {folder.name} is damaged: "
    for name, fact in facts.items():
        if not is_inner_name(name):
            raise DamagedError(f"{broken}it lists {name!r}, which is not a path inside it")
        path = folder / name
        try:
            check_inside(path, folder)
        except ValueError as e:
            raise DamagedError(f"{broken}{e}") from None
        if not path.is_file():
            raise DamagedError(f"{broken}{path} is missing")
        if (size := path.stat().st_size) != fact["bytes"]:
            raise DamagedError(f"{broken}{path} has {size} bytes, but {fact['bytes']} were written")
    for name, fact in facts.items():
        if fact["sha256"] is not None and file_sha256(folder / name) != fact["sha256"]:
            raise DamagedError(f"{broken}{folder / name} was changed after it was written")


def json_sha256(content: Mapping[str, object]) -> str:
    """SHA-256 of JSON content, independent of key order and white space."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below `folder`, `folder` itself, and its parent."""
    for path in sorted(folder.rglob("*")):
        sync_path(path)
    sync_path(folder)
    sync_path(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Write durably and atomically: a reader sees the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(path)
    sync_path(path.parent)

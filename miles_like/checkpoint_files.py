"""The files of a checkpoint folder: on disk before they count, and the same when they are read again.

The manifest has the size of every file and the SHA-256 of those that the driver writes or that are small. The ranks'
large files are not read by the driver: they have checksums of their own (megatron_bridge/checkpoint_sums.py), in a file
whose SHA-256 is in the manifest, and each rank verifies a share of them before it reads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_like.completion import file_sha256
from miles_like.hf_checkpoint import sync_path
from miles_like.regular_files import check_inside, is_inner_name

SMALL = 1 << 20  # bytes: a rank's file up to this size costs nothing to read once more


class DamagedError(ValueError):
    """A checkpoint is not what was written."""


def facts_of(folder: Path, *, but: str) -> dict[str, dict[str, Any]]:
    """{name: {bytes, sha256}} of all files below `folder` except `but`; sha256 is None of large files in subfolders."""
    out = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name, size = path.relative_to(folder).as_posix(), path.stat().st_size
        if name != but and not name.endswith(".tmp"):  # of a writer that was killed
            ours = path.parent == folder or size <= SMALL
            out[name] = {"bytes": size, "sha256": file_sha256(path) if ours else None}
    return out


def check_files(folder: Path, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises DamagedError naming the first file that is missing, has another size, or other bytes where they are known.

    Sizes first: they cost nothing, and a file that was cut is named as that.
    """
    broken = f"checkpoint {folder.name} is damaged: "
    for name, fact in facts.items():
        if not is_inner_name(name):
            raise DamagedError(f"{broken}it names {name!r}, which is no file below it")
        path = folder / name
        try:
            check_inside(path, folder)
        except ValueError as e:
            raise DamagedError(f"{broken}{e}") from None
        if not path.is_file():
            raise DamagedError(f"{broken}{path} is missing")
        if (size := path.stat().st_size) != fact["bytes"]:
            raise DamagedError(f"{broken}{path} has {size} bytes, {fact['bytes']} were written")
    for name, fact in facts.items():
        if fact["sha256"] is not None and file_sha256(folder / name) != fact["sha256"]:
            raise DamagedError(f"{broken}{folder / name} has other bytes than were written")


def sum_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of JSON, whatever its layout in the file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sync_tree(folder: Path) -> None:
    """Every file and folder below and including `folder`, and its own name, to disk."""
    for path in sorted(folder.rglob("*")):
        sync_path(path)
    sync_path(folder)
    sync_path(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Under a temporary name, to disk, then renamed, and the name too: a reader sees the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(path)
    sync_path(path.parent)

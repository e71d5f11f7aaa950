"""What a node of a test's cluster has on its disk; imports little, because each call is a new process."""

from __future__ import annotations

import hashlib
from pathlib import Path


def listed(root: Path) -> dict[str, str]:
    """File -> SHA-256, without hidden and partial files."""
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file() and not p.name.endswith((".partial", ".lock")) and p.name != ".complete.json"
    }


def times(root: Path) -> dict[str, int]:
    """Data file -> time of its last change in ns."""
    return {p.name: p.stat().st_mtime_ns for p in root.glob("*.distcp")}

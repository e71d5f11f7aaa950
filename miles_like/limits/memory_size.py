"""Amounts of memory: as a user writes them, and what this process has needed."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path


def parse_bytes(text: str) -> int:
    """`4GiB`, `512 MiB` or a plain number of bytes. Raises ValueError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?\s*", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"invalid memory size {text!r}: use for example 4GiB or 512MiB")
    unit = (found[2] or "B").upper()[0]
    amount = float(found[1]) * 1024 ** "BKMGT".index(unit)
    if amount >= 2**63:
        raise ValueError(f"{text[:40]!r} exceeds the memory of any machine: use for example 4GiB or 512MiB")
    return int(amount)


def peak_host_bytes() -> float:
    """Largest resident memory of this process since it began."""
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def oom_kills() -> int:
    """Processes that the kernel of this machine has ended for want of memory since it was booted; 0 where /proc/vmstat
    does not count them."""
    counters = Path("/proc/vmstat")
    lines = counters.read_text().splitlines() if counters.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

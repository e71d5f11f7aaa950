"""Amounts of memory as a user writes them."""

from __future__ import annotations

import re


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

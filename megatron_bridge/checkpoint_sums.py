"""Checksums of the files that the ranks of a training run write: made by who wrote them, verified before any is read.

torch's format has none, and a flipped byte of a weight would be trained on. Each rank reads its own files once more,
while they are in the page cache, and the first writes all checksums into one file of the directory. Who loads shares
the files out over its ranks, however many they are: each is read once more in all. The checksum is xxh3_128, which is
faster than memory is read; it is against damage and not against malice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
import xxhash

from megatron_bridge.agree import gather
from miles_like.regular_files import check_inside, is_inner_name, read_json

SUMS = "checksums.json"
SUMS_BYTES = 256 << 20  # the most that is read
BLOCK = 1 << 22


class DamagedFileError(ValueError):
    """A file of a rank is not what it wrote."""


def checksum(path: Path) -> str:
    """32 hex digits of a file's bytes."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as f:
        while block := f.read(BLOCK):
            digest.update(block)
    return str(digest.hexdigest())


def write_sums(directory: Path, sums: Sequence[Mapping[str, str]]) -> None:
    """`sums`: {file: checksum} of each rank; files that are in none of them are read here."""
    known = {name: digest for one in sums for name, digest in one.items()}
    others = sorted(p.name for p in directory.iterdir() if p.name not in known and p.name != SUMS)
    known |= {name: checksum(directory / name) for name in others}
    (directory / SUMS).write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")


def _sums(found: object) -> list[tuple[str, str]]:
    if not isinstance(found, dict) or not all(isinstance(digest, str) for digest in found.values()):
        raise ValueError("no object of names and checksums")
    if wrong := [name for name in found if not is_inner_name(name)]:
        raise ValueError(f"{wrong[0][:80]!r} names no file below it")
    return sorted(found.items())


def verify_sums(directory: Path) -> None:
    """Raises DamagedFileError on every rank, naming the first file that is missing or has other bytes. Collective.

    A directory without checksums, as an older run wrote it, is taken as it is.
    """
    path = directory / SUMS
    problem = None
    if os.path.lexists(path):
        try:
            check_inside(path, directory)
            names = _sums(read_json(path, SUMS_BYTES))
        except ValueError as e:
            names, problem = [], f"{path} cannot be read ({e})"
        for name, digest in names[dist.get_rank() :: dist.get_world_size()]:
            try:
                check_inside(directory / name, directory)
            except ValueError as e:
                problem = str(e)
                continue
            if not (directory / name).is_file():
                problem = f"{directory / name} is missing"
            elif checksum(directory / name) != digest:
                problem = f"{directory / name} has other bytes than were written"
    said = next((s for s in gather(problem) if s is not None), None)
    if said is not None:
        raise DamagedFileError(f"checkpoint {directory.parent.name} is damaged: {said}")

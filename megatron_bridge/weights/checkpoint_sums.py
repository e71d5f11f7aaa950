"""Checksums of the files of a training checkpoint: computed by the rank that wrote a file, verified before loading.

torch's format has none, and a flipped byte of a weight would go unnoticed. After writing, each rank reads its files
again while they are in the page cache, and rank 0 writes all checksums into one file of the directory. When a
checkpoint is loaded its ranks, however many, divide the files among them, so each file is read once for verification.
The checksum is xxh3_128, which is faster than memory bandwidth; it detects damage, not tampering.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
import xxhash

from megatron_bridge.device.collective_errors import gather_after
from miles_like.limits.regular_files import check_inside, is_inner_name, read_json

SUMS = "checksums.json"
SUMS_BYTES = 256 << 20  # limit on the size of the checksum file
BLOCK = 1 << 22


class DamagedFileError(ValueError):
    """A checkpoint file differs from what its rank wrote."""


def checksum(path: Path) -> str:
    """xxh3_128 of a file's bytes, 32 hex digits."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as f:
        while block := f.read(BLOCK):
            digest.update(block)
    return str(digest.hexdigest())


def write_sums(directory: Path, sums: Sequence[Mapping[str, str]]) -> None:
    """Write the checksum file. `sums`: {file: checksum} of each rank; any other files are read and hashed here."""
    known = {name: digest for one in sums for name, digest in one.items()}
    others = sorted(p.name for p in directory.iterdir() if p.name not in known and p.name != SUMS)
    known |= {name: checksum(directory / name) for name in others}
    (directory / SUMS).write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")


def _sums(found: object) -> list[tuple[str, str]]:
    if not isinstance(found, dict) or not all(isinstance(digest, str) for digest in found.values()):
        raise ValueError("it is not an object of file names and checksums")
    if wrong := [name for name in found if not is_inner_name(name)]:
        raise ValueError(f"{wrong[0][:80]!r} is not a file name inside it")
    return sorted(found.items())


def verify_sums(directory: Path, meet: Callable[[], None]) -> None:
    """Raise DamagedFileError on every rank, naming the first file that is missing or has other bytes. Collective, once
    every rank has read its files. meet: `StoreSignals.meet`.

    A directory without checksums, written by an older version, is not verified.
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
                problem = f"{directory / name} was changed after it was written"
    first = next((found for found in gather_after(problem, meet) if found is not None), None)
    if first is not None:
        raise DamagedFileError(f"checkpoint {directory.parent.name} is damaged: {first}")

"""Checksums of the files that the ranks of a training run write: made by who wrote them, verified before any is read.

torch's format has none, and a flipped byte of a weight would be trained on. Each rank reads its own files once more,
while they are in the page cache, and the first writes all checksums into one file of the directory. Who loads shares
the files out over its ranks, however many they are: each is read once more in all. The checksum is xxh3_128, which is
faster than memory is read; it is against damage and not against malice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
import xxhash

from megatron_bridge.agree import gather

SUMS = "checksums.json"
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


def verify_sums(directory: Path) -> None:
    """Raises DamagedFileError on every rank, naming the first file that is missing or has other bytes. Collective.

    A directory without checksums, as an older run wrote it, is taken as it is.
    """
    path = directory / SUMS
    problem = None
    if path.exists():
        try:
            names = sorted(json.loads(path.read_text(encoding="utf-8")).items())
        except ValueError as e:
            names, problem = [], f"{path} cannot be read ({e})"
        for name, digest in names[dist.get_rank() :: dist.get_world_size()]:
            if not (directory / name).is_file():
                problem = f"{directory / name} is missing"
            elif checksum(directory / name) != digest:
                problem = f"{directory / name} has other bytes than were written"
    said = next((s for s in gather(problem) if s is not None), None)
    if said is not None:
        raise DamagedFileError(f"checkpoint {directory.parent.name} is damaged: {said}")

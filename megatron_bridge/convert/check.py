"""Compares every tensor and file of a converted directory with its manifest, reading each byte once."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from megatron_bridge.convert.directory.manifest import MANIFEST, FileFact, Manifest
from megatron_bridge.convert.directory.torch_dist import TorchDist
from megatron_bridge.convert.memory_limit import plan_memory
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.limits.regular_files import open_regular


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The contents of a directory that matches its manifest."""

    kind: str  # "torch_dist" or "hf"
    tensors: int
    files: int
    bytes: int  # of all files


class _Span(NamedTuple):
    """The bytes of a tensor's piece in a file."""

    start: int
    size: int
    sum: str
    tensor: str


class _Difference(NamedTuple):
    file: str
    tensor: str | None  # None: in bytes outside of tensors
    what: str


def check(directory: Path | str, *, memory_limit: int = 4 << 30, workers: int = 1) -> CheckReport:
    """Read all files of `directory`, `workers` at a time (threads), in at most `memory_limit` bytes of memory.

    Files that the manifest does not list are ignored. Raises ValueError naming the first file and tensor that differ
    and the number of differences, when the directory has no manifest, and when its headers list other tensors.
    """
    directory = Path(directory)
    manifest = _manifest(directory)
    spans: defaultdict[str, list[_Span]] = defaultdict(list)
    for name, fact in manifest.tensors.items():
        for piece in fact.pieces:
            spans[piece.file].append(_Span(piece.start, piece.size, piece.sum, name))
    names = sum(map(len, spans.values()))
    block = plan_memory(memory_limit, 1, names=names, buffers=max(1, workers)).chunk_bytes
    files = sorted(manifest.files.keys() | spans.keys())
    work = partial(_check_file, directory, manifest, spans, block)
    with ThreadPoolExecutor(max(1, workers), "check") as pool:
        found = [difference for differences in pool.map(work, files) for difference in differences]
    if found:
        raise ValueError(_sentence(directory, manifest, files, found))
    if manifest.kind == "torch_dist":
        TorchDist(directory)
    else:
        _check_headers(directory, manifest)
    total = sum(fact.size for fact in manifest.files.values())
    return CheckReport(kind=manifest.kind, tensors=len(manifest.tensors), files=len(files), bytes=total)


def _manifest(directory: Path) -> Manifest:
    if Manifest.there(directory):
        return Manifest.read(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    if (directory / "metadata.json").is_file():
        raise ValueError(
            f"{directory} is a trainer's checkpoint, which has no {MANIFEST} to compare with: convert it with to-hf, "
            "which reads and checks all of its weights, and check the result"
        )
    raise ValueError(
        f"{directory} has no {MANIFEST}: it was not written by convert, quantize or dequantize, or not completely"
    )


def _check_file(
    directory: Path, manifest: Manifest, spans: dict[str, list[_Span]], block: int, name: str
) -> list[_Difference]:
    fact, inside = manifest.files.get(name), sorted(spans.get(name, []))
    first = inside[0].tensor if inside else None
    if fact is None:
        return [_Difference(name, first, "is not listed in the manifest")]
    try:
        size = (directory / name).stat().st_size
        if size == fact.size:
            return list(_compare(directory / name, name, fact, inside, block))
    except FileNotFoundError:
        return [_Difference(name, first, "is missing")]
    cut = next((p.tensor for p in inside if p.start + p.size > size), first)
    return [_Difference(name, cut, f"has {size} bytes, but the manifest lists {fact.size}")]


def _compare(path: Path, name: str, fact: FileFact, spans: Sequence[_Span], block: int) -> Iterator[_Difference]:
    whole, buffer = hashlib.sha256(), torch.empty(block, dtype=torch.uint8).numpy().data
    fine = True
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:

        def read(count: int) -> str:
            """The checksum of the next bytes."""
            digest = xxhash.xxh3_128()
            while count:
                got = file.readinto(buffer[: min(count, block)])
                if not got:
                    break  # truncated while it was read: the hashes differ
                whole.update(buffer[:got])
                digest.update(buffer[:got])
                count -= got
            return str(digest.hexdigest())

        for span in spans:
            read(span.start - file.tell())
            if read(span.size) != span.sum:
                fine = False
                yield _Difference(name, span.tensor, "does not match its checksum")
        read(fact.size - file.tell())
    if fine and whole.hexdigest() != fact.sha256:
        yield _Difference(name, None, "does not match its checksum")


def _sentence(directory: Path, manifest: Manifest, files: Sequence[str], found: Sequence[_Difference]) -> str:
    file, tensor, what = found[0]
    where = str(directory / file)
    if tensor is not None:
        where += f", tensor {tensor},"
    elif any(piece.file == file for fact in manifest.tensors.values() for piece in fact.pieces):
        where += ", outside of its tensors,"
    tensors, bad = len({d.tensor for d in found} - {None}), len({d.file for d in found})
    return (
        f"{where} {what}; {tensors} of {len(manifest.tensors)} tensors and {bad} of {len(files)} files differ: convert "
        "or copy the directory again"
    )


def _check_headers(directory: Path, manifest: Manifest) -> None:
    checkpoint = HFCheckpoint(directory)
    if set(checkpoint.names()) != manifest.tensors.keys():
        odd = min(set(checkpoint.names()) ^ manifest.tensors.keys())
        raise ValueError(
            f"{directory}: its manifest does not match the headers: {odd} is only in one of them; convert again"
        )
    for name, fact in manifest.tensors.items():
        info, (piece,) = checkpoint.info(name), fact.pieces
        theirs = (info.file.name, info.offset, info.nbytes, info.shape, str(info.dtype).removeprefix("torch."))
        if theirs != (piece.file, piece.start, piece.size, fact.shape, fact.dtype):
            raise ValueError(f"{directory}: its manifest does not match the headers: {name} differs; convert again")

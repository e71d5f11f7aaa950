"""`manifest.json` of a converted directory: the location and checksum of every tensor's bytes.

It is written last and contains its own SHA-256, so a truncated or edited manifest is an error. Checksums of tensor data
are xxh3_128, which is faster than memory bandwidth; those of files are SHA-256, computed while the files are written,
so that no checkpoint has to be read again to identify its files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from miles_like.limits.regular_files import is_inner_name, read_json

MANIFEST = "manifest.json"
MANIFEST_BYTES = 2 << 30  # limit on the size of the file
FORMAT = 1
Kind = Literal["torch_dist", "hf"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a tensor and the bytes that hold it.

    `sum` covers the file's bytes [start, start + size): a `torch.save` archive in a torch_dist directory, the tensor's
    raw bytes in a Hugging Face directory. `offset` and `sizes` are the box's, in elements.
    """

    file: str  # relative to the directory
    start: int
    size: int  # bytes
    sum: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """A tensor of the directory. The pieces cover each element once."""

    dtype: str  # torch's name, as "bfloat16"
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class FileFact:
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The manifest of a directory of one kind. `files` has all files except the manifest, by relative name.

    `tensors` are keyed by checkpoint key, or by Hugging Face name, scales included; `skipped` are known tensors of the
    source that were not converted.
    """

    kind: Kind
    tensors: Mapping[str, Fact]
    files: Mapping[str, FileFact]
    skipped: tuple[str, ...] = ()

    def write(self, directory: Path) -> None:
        """Write the file atomically and sync it to disk."""
        rest = self._as_json()
        path = directory / MANIFEST
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as out:
            json.dump({**rest, "sum": _sum(rest)}, out, sort_keys=True, separators=(",", ":"))
            out.flush()
            os.fsync(out.fileno())
        temporary.rename(path)

    @classmethod
    def there(cls, directory: Path) -> bool:
        return (directory / MANIFEST).is_file()

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises ValueError when it is missing, truncated, edited or of another format."""
        path = directory / MANIFEST
        try:
            value = read_json(path, MANIFEST_BYTES)
        except FileNotFoundError:
            raise ValueError(
                f"{path} is missing: {directory} is not a converted directory, or is incomplete; convert again"
            ) from None
        except ValueError:
            raise ValueError(f"{path} is truncated or damaged: convert again") from None
        if not isinstance(value, dict) or "sum" not in value:
            raise ValueError(f"{path} is not a manifest of a converted directory: convert again")
        if value.get("format") != FORMAT:
            raise ValueError(
                f"{path} has format {value.get('format')!r}, but this version reads {FORMAT}: convert again, or "
                "read it with the version that wrote it"
            )
        stored = value.pop("sum")
        if stored != _sum(value):
            raise ValueError(f"{path} was edited or is damaged (its checksum does not match): convert again")
        try:
            return cls(
                kind=value["kind"],
                tensors={
                    name: Fact(_text(fact["dtype"]), _counts(fact["shape"]), tuple(_piece(p) for p in fact["pieces"]))
                    for name, fact in value["tensors"].items()
                },
                files={_inner(name): _file_fact(fact) for name, fact in value["files"].items()},
                skipped=tuple(map(_text, value["skipped"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise ValueError(f"{path} has content that no conversion writes ({e}): convert again") from None

    def _as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "kind": self.kind,
            "tensors": {
                name: {
                    "dtype": fact.dtype,
                    "shape": list(fact.shape),
                    "pieces": [[p.file, p.start, p.size, p.sum, list(p.offset), list(p.sizes)] for p in fact.pieces],
                }
                for name, fact in self.tensors.items()
            },
            "files": {name: {"size": f.size, "sha256": f.sha256} for name, f in self.files.items()},
            "skipped": list(self.skipped),
        }


def checksum(data: bytes | memoryview) -> str:
    """xxh3_128 of `data`, 32 hex digits."""
    return str(xxhash.xxh3_128_hexdigest(data))


def _sum(rest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _piece(stored: list[Any]) -> Piece:
    file, start, size, digest, offset, sizes = stored
    (start, size), offset, sizes = _counts((start, size)), _counts(offset), _counts(sizes)
    return Piece(_inner(file), start, size, _text(digest), offset, sizes)


def _file_fact(fact: Mapping[str, object]) -> FileFact:
    if wrong := set(fact) - {"size", "sha256"}:
        raise ValueError(f"a file has {', '.join(sorted(wrong))}")
    return FileFact(_counts((fact["size"],))[0], _text(fact["sha256"]))


def _counts(found: Any) -> tuple[int, ...]:
    for number in found:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ValueError(f"{str(number)[:40]!r}, expected an integer of at least 0")
    return tuple(found)


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise ValueError(f"a {type(found).__name__}, expected text")
    return found


def _inner(name: object) -> str:
    if not is_inner_name(name):
        raise ValueError(f"{str(name)[:80]!r} is not a file name inside the directory")
    return str(name)

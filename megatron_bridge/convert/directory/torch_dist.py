"""Reads boxes of tensors from a `torch_dist` directory without a model or a process group, and only the bytes needed.

The directory is a converted one or a trainer's checkpoint of any layout. `.metadata` is a pickle that maps keys to
chunks; it is read with only torch's classes of that format, and everything else in it (such as each rank's plan, which
megatron adds) becomes an inert object. A chunk is one `torch.save` archive within a data file; its framing is parsed
here, so that rows of a large chunk can be read without the rest. If the directory has a manifest, complete chunks are
read and their checksums verified before any byte is used.

Format: torch.distributed.checkpoint 2.13; zip archives as torch.save writes them, uncompressed.
"""

from __future__ import annotations

import bisect
import hashlib
import io
import math
import os
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as _format
from torch.distributed.checkpoint.filesystem import _StorageInfo
from xxhash import xxh3_128

from megatron_bridge.convert.directory.manifest import Manifest, Piece, checksum
from megatron_bridge.convert.directory.torch_archive import UNREADABLE, MetadataUnpickler, View, data_start, spans
from miles_like.limits.regular_files import check_inside, open_regular, read_regular

METADATA = ".metadata"
METADATA_BYTES = 8 << 30  # limit on the size of the file
_DAMAGED = "copy or convert the checkpoint again"
_BLOCK = 8 << 20  # bytes per read when a chunk is only checked


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and the archive that holds it: bytes [start, start + size) of `file`."""

    file: str
    start: int
    size: int
    offset: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the checkpoint. Its chunks cover each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class TorchDist:
    """An open directory. The last chunk is kept for the next box if it has at most `keep_bytes`.

    Raises ValueError when the directory is not a `torch_dist` checkpoint, or its metadata is damaged or disagrees with
    its manifest. Reading raises ValueError naming file and tensor for gaps, overlaps, truncated files, archives that
    torch.save does not write, and checksums that differ. `bytes_read` counts the bytes read from data files.
    """

    def __init__(self, path: Path | str, *, keep_bytes: int = 256 << 20) -> None:
        self.path = Path(path)
        self.keep_bytes = keep_bytes
        self.bytes_read = 0
        if not (self.path / METADATA).is_file() or not (self.path / "metadata.json").is_file():
            raise ValueError(
                f"{self.path} is not a complete torch_dist checkpoint: it has no metadata.json with a {METADATA}; "
                "use a directory that a conversion or a save of the trainer has completed"
            )
        for name in (METADATA, "metadata.json"):
            check_inside(self.path / name, self.path)
        converted = Manifest.there(self.path) or (self.path / "hf").is_dir()  # a trainer's save has neither
        self.manifest = Manifest.read(self.path) if converted else None
        self.metadata = _metadata(self.path, self.manifest)
        self._chunks = _chunks(self.path, self.metadata)
        self._stored: dict[str, Stored] = {}
        self._by_row: dict[str, tuple[list[int], list[Chunk], int]] = {}
        self._sums: dict[tuple[str, int], str] = {}
        self._checked: set[tuple[str, int]] = set()
        self._starts: dict[tuple[str, int, torch.dtype, tuple[int, ...]], int] = {}
        self._object: tuple[str, bytes] | None = None
        self._kept: tuple[tuple[str, int], Tensor] | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._files: OrderedDict[str, int] = OrderedDict()
        if self.manifest is not None:
            self._check_manifest(self.manifest)

    def names(self) -> list[str]:
        """Names of all tensors, including the optimizer's, but not of objects such as `_extra_state`."""
        return [k for k, v in self.metadata.state_dict_metadata.items() if isinstance(v, _format.TensorStorageMetadata)]

    def __contains__(self, key: str) -> bool:
        return isinstance(self.metadata.state_dict_metadata.get(key), _format.TensorStorageMetadata)

    def stored(self, key: str) -> Stored:
        """The dtype, shape and chunks of a tensor. Raises ValueError when its chunks do not cover it exactly once."""
        if key not in self._stored:
            if key not in self:
                raise ValueError(f"{self.path} has no tensor {key}: use a checkpoint of this model")
            listed = self.metadata.state_dict_metadata[key]
            shape, chunks = tuple(listed.size), self._chunks.get(key, [])
            _assert_tiled(self.path, key, shape, chunks)
            ordered = sorted(chunks, key=lambda c: c.offset)
            self._stored[key] = Stored(listed.properties.dtype, shape, tuple(ordered))
            if shape:
                tallest = max((c.sizes[0] for c in ordered), default=0)
                self._by_row[key] = ([c.offset[0] for c in ordered], ordered, tallest)
        return self._stored[key]

    def read(self, key: str, offset: Sequence[int], sizes: Sequence[int], out: Tensor | None = None) -> Tensor:
        """The box of `sizes` at `offset` in the stored dtype, written into `out` (contiguous, elements in that order)
        if given."""
        stored = self.stored(key)
        assert len(offset) == len(sizes) == len(stored.shape), (key, offset, sizes)
        if out is None:
            out = torch.empty(tuple(sizes), dtype=stored.dtype)
        box = out.view(tuple(sizes))
        for chunk in self._touched(key, offset, sizes):
            low = [max(o, c) for o, c in zip(offset, chunk.offset, strict=True)]
            high = [min(o + n, c + m) for o, n, c, m in zip(offset, sizes, chunk.offset, chunk.sizes, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                target = box[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))]
                inside = [a - c for a, c in zip(low, chunk.offset, strict=True)]
                self._read_part(key, stored, chunk, inside, target)
        return out

    def read_object(self, key: str) -> bytes:
        """The bytes of a non-tensor object, such as `_extra_state`, verified with the manifest if there is one."""
        where = self.metadata.storage_data[_format.MetadataIndex(key)]
        if self._object is None or self._object[0] != where.relative_path:
            chunk = Chunk(where.relative_path, where.offset, where.length, (), ())
            fact = self.manifest.files.get(chunk.file) if self.manifest is not None else None
            if fact is None or fact.size > _BLOCK:  # in a converted directory all objects share one small file
                return bytes(self._bytes(key, chunk))
            raw = bytes(self._bytes(key, replace(chunk, start=0, size=fact.size)))
            if hashlib.sha256(raw).hexdigest() != fact.sha256:
                raise ValueError(f"{self.path / chunk.file} differs from the file that its manifest lists: {_DAMAGED}")
            self._object = (chunk.file, raw)
        return self._object[1][where.offset : where.offset + where.length]

    def _bytes(self, key: str, chunk: Chunk) -> memoryview:
        if chunk.start + chunk.size > os.fstat(self._open(chunk.file)).st_size:
            raise ValueError(f"{self.path / chunk.file} is truncated and ends before {key}: {_DAMAGED}")
        out = torch.empty(chunk.size, dtype=torch.uint8)
        self._pread(chunk, out, chunk.start, key)
        return out.numpy().data

    def close(self) -> None:
        """Close files and drop the kept chunk. Reading remains possible."""
        self._kept, self._buffer = None, torch.empty(0, dtype=torch.uint8)
        while self._files:
            os.close(self._files.popitem()[1])

    def _touched(self, key: str, offset: Sequence[int], sizes: Sequence[int]) -> Sequence[Chunk]:
        if not sizes:
            return self._stored[key].chunks
        starts, ordered, tallest = self._by_row[key]
        return ordered[
            bisect.bisect_right(starts, offset[0] - tallest) : bisect.bisect_left(starts, offset[0] + sizes[0])
        ]

    def _read_part(self, key: str, stored: Stored, chunk: Chunk, inside: Sequence[int], target: Tensor) -> None:
        """Read the box of a chunk that starts at `inside` into `target`."""
        if self.manifest is not None and tuple(target.shape) == chunk.sizes and target.is_contiguous():
            self._read_straight(key, stored, chunk, target)
            return
        held = self._whole(key, chunk)
        if held is not None:
            start = self._data_start(key, stored, chunk, held)
            raw = held[start : start + math.prod(chunk.sizes) * stored.dtype.itemsize]
            if raw.storage_offset() % stored.dtype.itemsize:
                raw = raw.clone()
            whole = raw.view(stored.dtype).view(chunk.sizes)
            target.copy_(whole[tuple(slice(a, a + n) for a, n in zip(inside, target.shape, strict=True))])
            return
        start = chunk.start + self._data_start(key, stored, chunk, None)
        part = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype)
        raw = part.reshape(-1).view(torch.uint8)
        done = 0
        for first, n in spans(chunk.sizes, inside, target.shape):
            nbytes = n * stored.dtype.itemsize
            self._pread(chunk, raw[done : done + nbytes], start + first * stored.dtype.itemsize, key)
            done += nbytes
        if part is not target:
            target.copy_(part)

    def _read_straight(self, key: str, stored: Stored, chunk: Chunk, target: Tensor) -> None:
        """Read a complete chunk directly into `target` and check it against the manifest: no byte is copied twice."""
        raw = target.view(-1).view(torch.uint8)
        start = self._data_start(key, stored, chunk, None)
        if start + len(raw) > chunk.size:
            self._check_sum(key, chunk, "")  # its framing was damaged
        parts = (
            torch.empty(start, dtype=torch.uint8),
            raw,
            torch.empty(chunk.size - start - len(raw), dtype=torch.uint8),
        )
        digest, position = xxh3_128(), chunk.start
        for part in parts:
            self._pread(chunk, part, position, key)
            digest.update(part.numpy().data)
            position += len(part)
        self._check_sum(key, chunk, digest.hexdigest())

    def _whole(self, key: str, chunk: Chunk) -> Tensor | None:
        """The archive's bytes, checked against the manifest; None without a manifest, or for a chunk that is too large
        to keep, which is checked here."""
        if self.manifest is None:
            return None
        at = (chunk.file, chunk.start)
        if self._kept is not None and self._kept[0] == at:
            return self._kept[1]
        self._kept = None
        if chunk.size > self.keep_bytes:
            if at not in self._checked:
                self._check_sum(key, chunk, self._sum_in_blocks(key, chunk))
                self._checked.add(at)
            return None
        if len(self._buffer) < chunk.size:
            self._buffer = torch.empty(chunk.size, dtype=torch.uint8)  # reused: new memory costs as much as reading
        held = self._buffer[: chunk.size]
        self._pread(chunk, held, chunk.start, key)
        self._check_sum(key, chunk, checksum(held.numpy().data))
        self._kept = (at, held)
        return held

    def _sum_in_blocks(self, key: str, chunk: Chunk) -> str:
        digest, block = xxh3_128(), torch.empty(min(_BLOCK, chunk.size), dtype=torch.uint8)
        for done in range(0, chunk.size, _BLOCK):
            part = block[: min(_BLOCK, chunk.size - done)]
            self._pread(chunk, part, chunk.start + done, key)
            digest.update(part.numpy().data)
        return digest.hexdigest()

    def _check_sum(self, key: str, chunk: Chunk, found: str) -> None:
        if found != self._sums[chunk.file, chunk.start]:
            raise ValueError(
                f"{self.path / chunk.file}: the bytes of {key} at {list(chunk.offset)} do not match its manifest: "
                f"the file is damaged or was changed; {_DAMAGED}"
            )

    def _data_start(self, key: str, stored: Stored, chunk: Chunk, held: Tensor | None) -> int:
        """Offset in bytes of a chunk's elements in its archive, whose framing is parsed at the first call."""
        if (at := (chunk.file, chunk.start, stored.dtype, tuple(chunk.sizes))) in self._starts:
            return self._starts[at]

        def part(at: int, size: int) -> bytes:
            if held is not None:
                return held[at : at + size].numpy().tobytes()
            return bytes(self._bytes(key, replace(chunk, start=chunk.start + at, size=size)))

        raw = View(chunk.size, part)  # reads only the bytes that are parsed
        try:
            start = self._starts[at] = data_start(raw, stored.dtype, chunk.sizes)
        except UNREADABLE as e:
            raise ValueError(
                f"{self.path / chunk.file}: {key} at {list(chunk.offset)} is not stored as torch.save stores a tensor "
                f"({e}): {_DAMAGED}"
            ) from None
        return start

    def _pread(self, chunk: Chunk, out: Tensor, position: int, key: str) -> None:
        """Read from `position` in the chunk's file into `out`, uint8."""
        view, done = out.numpy().data, 0
        while done < len(view):
            got = os.preadv(self._open(chunk.file), [view[done:]], position + done)
            if not got:
                raise ValueError(
                    f"{self.path / chunk.file} is truncated: {len(view) - done} bytes of {key} are missing: {_DAMAGED}"
                )
            done += got
        self.bytes_read += done

    def _open(self, file: str) -> int:
        if file not in self._files:
            if len(self._files) > 64:
                os.close(self._files.popitem(last=False)[1])
            try:
                check_inside(self.path / file, self.path)
                self._files[file] = open_regular(self.path / file)
            except FileNotFoundError:
                raise ValueError(f"{self.path / file} is missing, although {METADATA} lists it: {_DAMAGED}") from None
        return self._files[file]

    def _check_manifest(self, manifest: Manifest) -> None:
        """Raise ValueError when manifest and metadata list different tensors or chunks."""
        if manifest.kind != "torch_dist":
            raise ValueError(f"{self.path}: its manifest is of kind {manifest.kind!r}, not 'torch_dist': {_DAMAGED}")
        ours, theirs = set(self.names()), set(manifest.tensors)
        if ours != theirs:
            raise ValueError(
                f"{self.path}: its manifest does not match: {min(ours ^ theirs)} is only in "
                f"{'the manifest' if min(ours ^ theirs) in theirs else METADATA}; {_DAMAGED}"
            )
        for key, fact in manifest.tensors.items():
            listed = self.metadata.state_dict_metadata[key]
            dtype = str(listed.properties.dtype).removeprefix("torch.")
            same = (dtype, tuple(listed.size)) == (fact.dtype, tuple(fact.shape))
            if not same or {_place(p) for p in fact.pieces} != {_place(c) for c in self._chunks.get(key, [])}:
                raise ValueError(
                    f"{self.path}: its manifest does not match: its {key} differs from {METADATA}'s; {_DAMAGED}"
                )
            for piece in fact.pieces:
                self._sums[piece.file, piece.start] = piece.sum


def _metadata(path: Path, manifest: Manifest | None) -> Any:
    """The unpickled `.metadata`."""
    raw = read_regular(path / METADATA, METADATA_BYTES)
    fact = manifest.files.get(METADATA) if manifest is not None else None
    if manifest is not None and (fact is None or hashlib.sha256(raw).hexdigest() != fact.sha256):
        raise ValueError(f"{path / METADATA} differs from the file that its manifest lists: {_DAMAGED}")
    try:
        listed = MetadataUnpickler(io.BytesIO(raw)).load()
        tensors, storage = listed.state_dict_metadata, listed.storage_data
        if not isinstance(tensors, dict) or not isinstance(storage, dict):
            raise pickle.UnpicklingError("it has no tensors")
        _check_listed(tensors, storage)
    except (*UNREADABLE, ValueError) as e:
        raise ValueError(f"{path / METADATA} cannot be read ({e}): {_DAMAGED}") from None
    listed.all_local_plans = None  # every rank's plan, which megatron adds: large and not needed
    return listed


def _check_listed(tensors: Mapping[Any, Any], storage: Mapping[Any, Any]) -> None:
    """Raise ValueError for objects of torch's classes whose fields do not have the declared types."""

    def counts(found: Any) -> bool:
        return all(type(number) is int and 0 <= number < 1 << 63 for number in found)

    for key, value in tensors.items():
        if not isinstance(key, str):
            raise ValueError(f"a tensor's key is of type {type(key).__name__}")
        if not isinstance(value, _format.TensorStorageMetadata):
            continue
        whole = isinstance(value.properties.dtype, torch.dtype) and counts(value.size)
        if not whole or not all(counts(c.offsets) and counts(c.sizes) for c in value.chunks):
            raise ValueError(f"{key} has an invalid dtype, shape or chunk")
        if not all(len(c.offsets) == len(c.sizes) == len(value.size) for c in value.chunks):
            raise ValueError(f"{key} has a chunk with a different number of dimensions")
    for where in storage.values():
        if isinstance(where, _StorageInfo) and not (
            isinstance(where.relative_path, str) and counts((where.offset, where.length))
        ):
            raise ValueError(f"a chunk has an invalid location {where}")


def _chunks(path: Path, listed: Any) -> Mapping[str, list[Chunk]]:
    """Key -> unordered chunks. Raises ValueError for storage of another kind, or outside the directory."""
    sizes = {
        (key, tuple(chunk.offsets)): tuple(chunk.sizes)
        for key, value in listed.state_dict_metadata.items()
        if isinstance(value, _format.TensorStorageMetadata)
        for chunk in value.chunks
    }
    out: defaultdict[str, list[Chunk]] = defaultdict(list)
    for index, where in listed.storage_data.items():
        if not isinstance(index, _format.MetadataIndex) or not isinstance(where, _StorageInfo):
            raise ValueError(f"{path / METADATA} lists storage of an unknown kind ({type(where).__name__}): {_DAMAGED}")
        if index.offset is None:
            continue
        if getattr(where, "transform_descriptors", None) or Path(where.relative_path).name != where.relative_path:
            raise ValueError(f"{path}: {index.fqn} is stored in an unsupported way ({where}): save it as torch_dist")
        offset = tuple(index.offset)
        if (index.fqn, offset) not in sizes:
            raise ValueError(f"{path / METADATA}: {index.fqn} has no chunk at {list(offset)}: {_DAMAGED}")
        box = sizes.pop((index.fqn, offset))
        out[index.fqn].append(Chunk(where.relative_path, where.offset, where.length, offset, box))
    if sizes:
        key, offset = min(sizes)
        raise ValueError(f"{path / METADATA}: the chunk of {key} at {list(offset)} is not stored: {_DAMAGED}")
    return out


def _assert_tiled(path: Path, key: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> None:
    """Raise ValueError unless the chunks lie inside the shape, do not overlap and cover it."""
    covered = sum(math.prod(c.sizes) for c in chunks)
    inside = all(o >= 0 and o + n <= size for c in chunks for o, n, size in zip(c.offset, c.sizes, shape, strict=True))
    if not inside or covered != math.prod(shape) or _overlap(chunks):
        raise ValueError(
            f"{path / METADATA}: the {len(chunks)} chunks of {key} {list(shape)} have gaps or overlap: they have "
            f"{covered} of {math.prod(shape)} elements: {_DAMAGED}"
        )


def _overlap(chunks: Sequence[Chunk]) -> bool:
    open_now: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda c: c.offset):
        if not chunk.offset:
            return len(chunks) > 1
        open_now = [c for c in open_now if c.offset[0] + c.sizes[0] > chunk.offset[0]]
        for other in open_now:
            pairs = zip(chunk.offset, chunk.sizes, other.offset, other.sizes, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in pairs):
                return True
        open_now.append(chunk)
    return False


def _place(part: Piece | Chunk) -> tuple[Any, ...]:
    return part.file, part.start, part.size, tuple(part.offset), tuple(part.sizes)

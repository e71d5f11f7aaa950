"""Hugging Face safetensors -> Megatron `torch_dist` checkpoint, without a model or a process group, in bounded memory.

Stock `megatron.core.dist_checkpointing.load` reads the result into a GPTModel of the local spec in any layout (its
`moe_layer_freq` is a list, so keys contain the global layer number). Besides the data files there are `manifest.json`
and, in `hf/`, config.json and all other files of the source except weights, for the conversion back.

Memory: a few chunks and the metadata. Format: torch.distributed.checkpoint 2.13, one `torch.save` archive per box.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import mmap
import pickle
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.serialization import get_crc32_options, set_crc32_options

from megatron_bridge.convert.directory.boxes import Box, Grid, boxes, checkpoint_key, checkpoint_shape, extra_state_keys
from megatron_bridge.convert.directory.manifest import MANIFEST, Fact, FileFact, Manifest, Piece
from megatron_bridge.convert.hf_inputs import bind, check_copies, checked_places, copy_of
from megatron_bridge.convert.memory_limit import MIB, plan_memory
from megatron_bridge.convert.source import Source
from megatron_bridge.convert.units import (
    ELSEWHERE,
    ConvertReport,
    HashedFile,
    Spread,
    Watch,
    building,
    finished_unit,
    run_units,
    unwatched,
    write_file,
)
from megatron_bridge.families.base import Place, TensorMap
from megatron_bridge.families.registry import family_of
from miles_like.hf.checkpoint import TensorInfo, companions

COMPANIONS = "hf"  # the folder
CONTENT_METADATA = {"singleton_local_shards": False}


def to_megatron(
    hf_dir: Path,
    out: Path,
    *,
    memory_limit: int = 4 << 30,
    workers: int = 1,
    spread: Spread | None = None,
    watch: Watch = unwatched,
    tp: int = 1,
    etp: int = 1,
) -> ConvertReport:
    """Convert the checkpoint in `hf_dir`, BF16, FP32 or in any quantized format, into the new directory `out`.

    memory_limit: bytes of resident memory for all local processes together (with `spread`: for each remote process).
    workers: processes. watch: shows the progress. tp, etp: the layout whose ranks read only their own bytes; every
    layout can load the result.

    Raises ValueError naming a tensor that is missing, unknown, of a wrong shape or dtype, or without its scale (before
    anything is written), or that is not finite or a copy that differs from its original (then nothing is kept); also
    for an unknown family, an existing `out`, and a memory limit that is too small. Raises OSError naming `out` when the
    disk is full and RuntimeError when a worker process dies; finished units are then kept for the next run.
    """
    source = Source.open(hf_dir)
    names = source.names()
    least = max((source.block_rows(name) * _row_bytes(source, name) for name in names), default=1)
    scratch = max(map(source.scratch, names), default=0)
    grid, known = Grid(tp, etp), len(names)
    while True:  # smaller chunks make more pieces, which need bookkeeping too
        memory = plan_memory(
            memory_limit, workers, separate_process=spread is not None, names=known, least=least, scratch=scratch
        )
        pieces = _count_pieces(source, grid, memory.chunk_bytes)
        if pieces <= known:
            break
        known = pieces
    return convert_source(
        source, out, grid, chunk_bytes=memory.chunk_bytes, workers=memory.workers, spread=spread, watch=watch
    )


def convert_source(
    source: Source,
    out: Path,
    grid: Grid = Grid(),  # noqa: B008  frozen
    *,
    chunk_bytes: int = 64 * MIB,
    unit_bytes: int = 512 * MIB,
    workers: int = 1,
    spread: Spread | None = None,
    watch: Watch = unwatched,
) -> ConvertReport:
    """As `to_megatron`. `chunk_bytes` limits one archive, `unit_bytes` the work of a worker that a kill can lose."""
    job = plan_conversion(source, grid, chunk_bytes=chunk_bytes, unit_bytes=unit_bytes)
    with building(out, job) as partial:
        kept = run_units(job, partial, workers=workers, spread=spread, watched=watch(partial, job.nbytes))
        size = _finish(job, partial)
    return ConvertReport(tensors=job.tensors, skipped=job.skipped, bytes=size, units=len(job.units), units_kept=kept)


def plan_conversion(
    source: Source,
    grid: Grid = Grid(),  # noqa: B008  frozen
    *,
    chunk_bytes: int = 64 * MIB,
    unit_bytes: int = 512 * MIB,
) -> Conversion:
    """A plan of what to read and where to write it, for every tensor; reads no data. Raises ValueError as `to_megatron`
    before anything is written."""
    tensors, copies = bind(source)
    places, skipped = checked_places(source, tensors)
    check_copies(source, copies)
    units = [
        tuple(
            box
            for place in unit
            for box in boxes(place, tensors, grid, chunk_bytes=chunk_bytes, align=source.block_rows(place.hf_name))
        )
        for unit in _units(source, places, unit_bytes)
    ]
    copies_of: dict[str, tuple[str, ...]] = {}
    for copy, place in copies.items():
        copies_of[place.hf_name] = (*copies_of.get(place.hf_name, ()), copy)
    return Conversion(source, tuple(units), copies_of, len(places), skipped, tensors.mtp)


def _count_pieces(source: Source, grid: Grid, chunk_bytes: int) -> int:
    tensors, _ = bind(source)
    return sum(
        1
        for place in tensors.places()
        if place.hf_name in source
        for _ in boxes(place, tensors, grid, chunk_bytes=chunk_bytes, align=source.block_rows(place.hf_name))
    )


def _row_bytes(source: Source, name: str) -> int:
    shape = source.shape(name)
    return source.nbytes(name) // max(1, shape[0] if shape else 1)


def _units(source: Source, places: Sequence[Place], unit_bytes: int) -> list[list[Place]]:
    """Runs of tensors of at most `unit_bytes`, in the source's order; a larger tensor is a separate unit."""
    units: list[list[Place]] = []
    size = 0
    for place in places:
        nbytes = source.nbytes(place.hf_name)
        if not units or size + nbytes > unit_bytes:
            units.append([])
            size = 0
        units[-1].append(place)
        size += nbytes
    return units


@dataclass(frozen=True)
class Conversion:
    """The conversion `Job`: a unit is a data file of boxes; `copies` (original -> names) must equal their originals."""

    source: Source
    units: tuple[tuple[Box, ...], ...]
    copies: Mapping[str, tuple[str, ...]]
    tensors: int  # of the source that are converted
    skipped: tuple[str, ...]  # names of the others
    mtp: bool  # with the draft layers

    @property
    def count(self) -> int:
        return len(self.units)

    @property
    def nbytes(self) -> int:
        """Of the tensors that are written."""
        return sum(math.prod(box.sizes) * box.dtype.itemsize for unit in self.units for box in unit)

    def file(self, number: int) -> str:
        return f"__{number}_0.distcp"

    def proof(self, number: int) -> str:
        """A hash of the unit's boxes and of the files it is read from (size and time, not contents)."""
        held, stored = self.units[number], self.read_by(number)
        stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted({info.file for info in stored})]
        lie = [(str(info.dtype), info.shape, info.file.name, info.offset) for info in stored]
        described = [(b.key, b.shape, b.offset, b.sizes, str(b.dtype), b.hf_name, b.first) for b in held]
        spec = None if self.source.spec is None else asdict(self.source.spec)
        return hashlib.sha256(json.dumps([stats, lie, described, spec]).encode()).hexdigest()

    def read_by(self, number: int) -> list[TensorInfo]:
        """The stored tensors that a unit is read from, scales and copies included."""
        names = dict.fromkeys(b.hf_name for b in self.units[number])
        read = [n for name in names for n in (name, *self.copies.get(name, ()))]
        return [info for name in read for info in self.source.stored(name)]

    def write(self, number: int, out: HashedFile) -> list[list[Any]]:
        """Write a unit; returns [start, size, checksum] of each box's archive."""
        facts = []
        with _no_crc():
            for rows, held in self._read_ahead(self.units[number]):
                for box in held:
                    part = rows if box.columns is None else rows[:, slice(*box.columns)].contiguous()
                    torch.save(part.reshape(box.sizes), cast(IO[bytes], out))  # uses only write and flush
                    facts.append(list(out.cut()))
        return facts

    def _read_ahead(self, held: Sequence[Box]) -> Iterator[tuple[Tensor, list[Box]]]:
        """Rows and their boxes; the next rows are read and checked while the caller processes the current ones."""
        reads = [list(same) for _, same in itertools.groupby(held, lambda b: (b.hf_name, b.first, b.last))]
        size = max(self._read_bytes(same[0]) for same in reads)
        buffers = itertools.cycle([_buffer(size) for _ in range(2)])
        with ThreadPoolExecutor(1, "read") as reader:
            coming = reader.submit(self._rows, reads[0][0], next(buffers))
            for i, same in enumerate(reads):
                rows = coming.result()
                if i + 1 < len(reads):
                    coming = reader.submit(self._rows, reads[i + 1][0], next(buffers))
                yield rows, same

    def _read_bytes(self, box: Box) -> int:
        info, block = self.source.stored(box.hf_name)[0], self.source.block_rows(box.hf_name)
        rows = -(-box.last // block) * block - box.first // block * block
        return max(1, info.nbytes // max(1, info.shape[0]) * rows)

    def _rows(self, box: Box, buffer: memoryview) -> Tensor:
        """[rows, ...] of the source tensor in the checkpoint's dtype, in storage of exactly that size."""
        name = box.hf_name
        rows = self.source.rows(name, box.first, box.last, buffer)
        if rows.numel():
            low, high = torch.aminmax(rows)  # NaN if any value is NaN; ten times as fast as isfinite
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise ValueError(
                    f"tensor {name!r}: {int((~torch.isfinite(rows)).sum())} of {rows.numel()} values in rows "
                    f"{box.first}..{box.last - 1} are not finite: the checkpoint is damaged, fetch it again"
                )
        for copy in self.copies.get(name, ()):
            again = self.source.rows(copy, box.first, box.last)
            if not torch.equal(rows.view(torch.uint8), again.view(torch.uint8)):
                raise ValueError(f"tensor {copy!r} differs in rows {box.first}..{box.last - 1}: {copy_of(name)}")
        return rows.to(box.dtype)


def _buffer(size: int) -> memoryview:
    """Anonymous memory in huge pages if available: first access to 4 KiB pages takes longer than reading into them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


@contextmanager
def _no_crc() -> Iterator[None]:
    """Disable the archives' CRC32, which readers do not check: the manifest has much faster checksums."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


# the directory


def _finish(job: Conversion, directory: Path) -> int:
    """Write the files that complete the checkpoint, and the manifest; returns the bytes of all files."""
    tensors = family_of(job.source.hf.config).bind(job.source.hf.config, mtp=job.mtp)
    files: dict[str, FileFact] = {}
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, Box] = {}
    saved, elsewhere = _Saved(), {}
    for number in range(job.count):
        unit = finished_unit(job, directory, number)
        file = job.file(number)
        files[file] = unit.file
        if unit.holder is not None:
            elsewhere[file] = unit.holder
        for box, (start, size, digest) in zip(job.units[number], unit.facts, strict=True):
            saved.add(box, file, start, size)
            pieces.setdefault(box.key, []).append(Piece(file, start, size, digest, box.offset, box.sizes))
            kinds[box.key] = box
    blob = _archive([None])  # every `_extra_state` is this, stored once
    empty_state = job.file(job.count)
    for key in extra_state_keys(tensors):
        saved.add_object(key, empty_state, len(blob))
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {"sharded_backend_version": 1, "common_backend_version": 1}
    beside = {
        empty_state: blob,
        ".metadata": pickle.dumps(saved.metadata(tensors)),
        "common.pt": _archive({"content_metadata": CONTENT_METADATA}),
        "metadata.json": json.dumps({**backends, **versions}).encode(),  # its presence makes a directory a checkpoint
    }
    hf = job.source.hf.path
    if elsewhere:
        (directory / ELSEWHERE).write_text(json.dumps(elsewhere, indent=1, sort_keys=True), encoding="utf-8")
    for path in (hf / "config.json", *companions(hf)):
        beside[f"{COMPANIONS}/{path.relative_to(hf)}"] = path.read_bytes()
    for name, data in beside.items():
        (directory / name).parent.mkdir(exist_ok=True)
        files[name] = write_file(directory / name, data)
    facts = {
        key: Fact(str(box.dtype).removeprefix("torch."), box.shape, tuple(pieces[key])) for key, box in kinds.items()
    }
    Manifest("torch_dist", facts, files, job.skipped).write(directory)
    return sum(fact.size for fact in files.values()) + (directory / MANIFEST).stat().st_size


def _archive(value: Any) -> bytes:
    blob = io.BytesIO()
    torch.save(value, blob)
    return blob.getvalue()


class _Saved:
    """Collects the plan and storage entries that a save by torch.distributed.checkpoint would produce."""

    def __init__(self) -> None:
        self.items: list[WriteItem] = []
        self.storage: dict[MetadataIndex, _StorageInfo] = {}

    def add(self, box: Box, file: str, start: int, size: int) -> None:
        index = MetadataIndex(box.key, torch.Size(box.offset))
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.sizes)),
            properties=TensorProperties(dtype=box.dtype),
            size=torch.Size(box.shape),
        )
        self.items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.storage[index] = _StorageInfo(file, start, size)

    def add_object(self, key: str, file: str, size: int) -> None:
        self.items.append(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO))
        self.storage[MetadataIndex(key)] = _StorageInfo(file, 0, size)

    def metadata(self, tensors: TensorMap) -> Metadata:
        plans, metadata = create_default_global_save_plan([SavePlan(self.items)])
        errors: object = _validate_global_plan(plans, metadata)  # overlap, bounds, full cover of every tensor
        assert errors is True or errors == [], errors  # True: of torch before 2.13
        _assert_schema(metadata, tensors)
        # as in FileSystemWriter.finish, but without its random ids: the same input gives the same bytes
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = self.storage
        return metadata


def _assert_schema(metadata: Metadata, tensors: TensorMap) -> None:
    """Assert that the written keys, shapes and dtypes are the table's."""
    written = {
        key: (tuple(value.size), value.properties.dtype)
        for key, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    wanted = {checkpoint_key(p): (checkpoint_shape(tensors, p), tensors.dtype(p.entry)) for p in tensors.places()}
    assert written == wanted, sorted(written.items() ^ wanted.items())[:5]

"""Hugging Face safetensors -> Megatron `torch_dist` checkpoint, without a model or a process group, in bounded memory.

The result is what stock `megatron.core.dist_checkpointing.load` reads into a GPTModel of the local spec in any layout
(its `moe_layer_freq` is a list, so keys carry the global layer number). Memory is a few chunks and the metadata.

Work is cut into units, each one data file and then one index file; an index proves its data. They grow in `OUT.partial`
and are renamed to OUT when all are whole, so a killed conversion resumes at the unit it was in, and an unfinished one
cannot be loaded. Format: torch.distributed.checkpoint 2.13, one `torch.save` archive a chunk.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron_bridge.families.base import Family, HFConfig, Place, Precision, TensorMap
from megatron_bridge.families.registry import family_of
from miles_like.hf_checkpoint import HFCheckpoint

MIB = 1 << 20
_MEND = "free some space and run again (what is converted is kept), or choose a directory on another disk"
CONTENT_METADATA = {"singleton_local_shards": False}
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What a conversion did."""

    tensors: int  # Hugging Face tensors converted
    skipped: tuple[str, ...]  # known tensors that are not trained, or repeat one that is
    bytes: int  # of all files in the output
    units: int
    units_kept: int  # of them, found whole from an interrupted run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Rows [first, last) of one Hugging Face tensor, as a box of a checkpoint tensor."""

    key: str
    shape: tuple[int, ...]  # of the whole checkpoint tensor
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    hf_name: str
    first: int
    last: int


def convert_checkpoint(hf_dir: Path, out_dir: Path) -> ConvertReport:
    """Convert the checkpoint in `hf_dir`. Raises ValueError as `convert_to_megatron` does, and for no known family."""
    source = HFCheckpoint(hf_dir)
    return convert_to_megatron(source, out_dir, family_of(source.config), source.config)


def convert_to_megatron(
    source: HFCheckpoint,
    out: Path,
    family: Family,
    hf_config: HFConfig,
    *,
    chunk_bytes: int = 64 * MIB,
    unit_bytes: int = 512 * MIB,
) -> ConvertReport:
    """Write `out`, a new directory. `chunk_bytes` bounds one archive, `unit_bytes` what a kill can lose.

    Raises ValueError naming the tensor that is missing, unknown, of a wrong shape or dtype (before anything is written)
    or not finite (`out` is then not made, nor anything kept), and where `out` exists; OSError naming `out` when the
    disk is full (what is whole is kept for the next try).
    """
    if out.exists():
        raise ValueError(f"{out} exists: convert into a new directory, or remove it")
    tensors = family.bind(hf_config, mtp=True)
    if not any(place.depth is not None and place.hf_name in source for place in tensors.places()):
        tensors = family.bind(hf_config)  # announced in config.json, but a checkpoint may leave its draft layers out
    places, skipped = _checked_places(source, tensors)
    units = _units(source, places, unit_bytes)
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    kept = 0
    try:
        for number, unit in enumerate(units):
            chunks = [c for place in unit for c in _chunks(place, tensors, chunk_bytes)]
            proof = _fingerprint(source, chunks)
            if _is_whole(partial, number, proof):
                kept += 1
            else:
                _write_unit(source, partial, number, chunks, proof)
        _finish(partial, len(units), tensors)
    except ValueError:
        shutil.rmtree(partial)
        raise
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(e.errno, f"disk full: {out} was not written; {_MEND}") from e
    _sync_directory(partial)
    partial.rename(out)
    _sync_directory(out.parent)
    # only after the rename: a kill in between leaves harmless files and never loses finished units
    for number in range(len(units)):
        _index_path(out, number).unlink()
    size = sum(f.stat().st_size for f in out.iterdir())
    return ConvertReport(tensors=len(places), skipped=skipped, bytes=size, units=len(units), units_kept=kept)


def _checked_places(source: HFCheckpoint, tensors: TensorMap) -> tuple[list[Place], tuple[str, ...]]:
    """Places of all source tensors, in the source's order, and the names to skip; raises ValueError (see above)."""
    names = list(source.names())
    # transformers saves the shared expert of a model that has none as tensors without elements
    skipped = tuple(name for name in names if tensors.is_skipped(name) or 0 in source.info(name).shape)
    beside = set(skipped)
    places = [tensors.place_of(name) for name in names if name not in beside]
    have = {place.hf_name for place in places}
    missing = [place.hf_name for place in tensors.places() if place.hf_name not in have]
    if missing:
        raise ValueError(
            f"checkpoint lacks {len(missing)} of the model's tensors, first {missing[0]!r}: "
            "download it again, or correct config.json"
        )
    for place in places:
        info = source.info(place.hf_name)
        if tuple(info.shape) != place.shape:
            raise ValueError(
                f"tensor {place.hf_name!r} has shape {tuple(info.shape)}, config.json wants {place.shape}: "
                "correct config.json, or fetch the checkpoint it belongs to"
            )
        wanted = tensors.dtype(place.entry)
        widens = place.entry.precision is Precision.FP32 and info.dtype is torch.bfloat16
        if info.dtype is not wanted and not widens:
            raise ValueError(
                f"tensor {place.hf_name!r} is {info.dtype}, wanted {wanted}: dequantize the checkpoint first, or set "
                "dtype in config.json to what the tensors are"
            )
    return places, skipped


def _units(source: HFCheckpoint, places: Sequence[Place], unit_bytes: int) -> list[list[Place]]:
    """Runs of tensors of at most `unit_bytes`, in the source's order; a larger tensor is a unit of its own."""
    units: list[list[Place]] = []
    size = 0
    for place in places:
        nbytes = source.info(place.hf_name).nbytes
        if not units or size + nbytes > unit_bytes:
            units.append([])
            size = 0
        units[-1].append(place)
        size += nbytes
    return units


def checkpoint_key(place: Place) -> str:
    """Key of the checkpoint tensor that holds a Hugging Face tensor; all experts of a layer share one."""
    pattern = place.entry.stored or place.entry.megatron.replace(".local_experts.{e}.", ".experts.")
    return pattern.format(i=place.layer, j=place.depth)


def _chunks(place: Place, tensors: TensorMap, chunk_bytes: int) -> Iterator[_Chunk]:
    dtype, rest = tensors.dtype(place.entry), place.shape[1:]
    lead = () if place.expert is None else (place.expert,)
    lead_shape = () if place.expert is None else (tensors.dims["experts"],)
    step = max(1, chunk_bytes // (math.prod(rest) * dtype.itemsize))
    for start, target, rows in tensors.runs(place.entry, place.part):
        for done in range(0, rows, step):
            size = min(step, rows - done)
            yield _Chunk(
                key=checkpoint_key(place),
                shape=(*lead_shape, *tensors.megatron_shape(place.entry)),
                offset=(*lead, target + done, *(0 for _ in rest)),
                sizes=(*(1 for _ in lead), size, *rest),
                dtype=dtype,
                hf_name=place.hf_name,
                first=start + done,
                last=start + done + size,
            )


def extra_state_keys(tensors: TensorMap) -> Iterator[str]:
    """Keys of the `_extra_state` objects that stock loading insists on: one a parallel linear and expert."""
    for entry in tensors.entries:
        if entry.linear:
            base = entry.megatron.removesuffix(".weight").replace(".local_experts.{e}.", ".experts.")
            count = tensors.experts_of(entry)
            for layer in tensors.layers_of(entry):
                for e in range(count):
                    yield f"{base.format(i=layer, j=tensors.depth(layer))}._extra_state/shard_{e}_{count}"


def _data_path(directory: Path, number: int) -> Path:
    return directory / f"__{number}_0.distcp"


def _index_path(directory: Path, number: int) -> Path:
    return directory / f"__{number}_0.json"


def _fingerprint(source: HFCheckpoint, chunks: Sequence[_Chunk]) -> str:
    """Of what a unit holds and of the files it is read from (size and time, not contents)."""
    files = sorted({source.info(c.hf_name).file for c in chunks})
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    described = [(c.key, c.shape, c.offset, c.sizes, str(c.dtype), c.hf_name) for c in chunks]
    return hashlib.sha256(json.dumps([stats, described]).encode()).hexdigest()


def _is_whole(directory: Path, number: int, proof: str) -> bool:
    try:
        index = json.loads(_index_path(directory, number).read_text())
        return bool(index["proof"] == proof and _data_path(directory, number).stat().st_size == index["size"])
    except (FileNotFoundError, json.JSONDecodeError):
        return False


def _write_unit(source: HFCheckpoint, directory: Path, number: int, chunks: Sequence[_Chunk], proof: str) -> None:
    path = _data_path(directory, number)
    items = []
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        for chunk in chunks:
            start = file.tell()
            torch.save(_read(source, chunk), file)
            items.append([chunk.key, chunk.shape, chunk.offset, chunk.sizes, _name(chunk.dtype), start, file.tell()])
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    temporary.rename(path)
    index = {"proof": proof, "size": size, "items": items}
    _write_whole(_index_path(directory, number), json.dumps(index).encode())


def _read(source: HFCheckpoint, chunk: _Chunk) -> torch.Tensor:
    rows = source.read_rows(chunk.hf_name, chunk.first, chunk.last)
    if not bool(torch.isfinite(rows).all()):
        bad = int((~torch.isfinite(rows)).sum())
        raise ValueError(
            f"tensor {chunk.hf_name!r}: {bad} of {rows.numel()} values in rows {chunk.first}..{chunk.last - 1} are not "
            "finite: the checkpoint is damaged, fetch it again"
        )
    value = rows.to(chunk.dtype).reshape(chunk.sizes).contiguous()
    if value.untyped_storage().nbytes() != value.numel() * value.element_size():
        value = value.clone()  # torch.save writes a view's whole storage
    return value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _finish(directory: Path, units: int, tensors: TensorMap) -> None:
    """Indexes -> `.metadata`, `common.pt` and, last, `metadata.json`, which makes the directory a checkpoint."""
    items: list[WriteItem] = []
    results: list[WriteResult] = []
    for number in range(units):
        file = _data_path(directory, number).name
        unit = json.loads(_index_path(directory, number).read_text())
        for key, shape, offset, sizes, dtype, start, end in unit["items"]:
            index = MetadataIndex(key, torch.Size(offset))
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)),
                properties=TensorProperties(dtype=_DTYPES[dtype]),
                size=torch.Size(shape),
            )
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
            results.append(_result(index, file, start, end - start))
    blob = io.BytesIO()
    torch.save([None], blob)  # every `_extra_state` is this, stored once
    empty_state = _data_path(directory, units)
    _write_whole(empty_state, blob.getvalue())
    for key in extra_state_keys(tensors):
        index = MetadataIndex(key)
        items.append(WriteItem(index=index, type=WriteItemType.BYTE_IO))
        results.append(_result(index, empty_state.name, 0, len(blob.getvalue())))
    plans, metadata = create_default_global_save_plan([SavePlan(items)])
    errors = _validate_global_plan(plans, metadata)  # overlap, bounds, full cover of every tensor
    assert not errors, errors[:5]
    _assert_schema(metadata, tensors)
    FileSystemWriter(directory).finish(metadata, [results])
    torch.save({"content_metadata": CONTENT_METADATA}, directory / "common.pt")
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {"sharded_backend_version": 1, "common_backend_version": 1}
    _write_whole(directory / "metadata.json", json.dumps({**backends, **versions}).encode())


def _result(index: MetadataIndex, file: str, offset: int, length: int) -> WriteResult:
    return WriteResult(index=index, size_in_bytes=length, storage_data=_StorageInfo(file, offset, length))


def _assert_schema(metadata: Metadata, tensors: TensorMap) -> None:
    """Keys, shapes and dtypes written are the table's."""
    written: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
        key: (tuple(value.size), value.properties.dtype)
        for key, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    wanted = {}
    for place in tensors.places():
        lead = () if place.expert is None else (tensors.dims["experts"],)
        wanted[checkpoint_key(place)] = ((*lead, *tensors.megatron_shape(place.entry)), tensors.dtype(place.entry))
    assert written == wanted, sorted(written.items() ^ wanted.items())[:5]


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

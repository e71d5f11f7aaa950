"""Reads and writes a Hugging Face model directory as a stream of named tensors, in the memory of a few tensors.

A safetensors file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, byte range in the
data) and the data without holes (huggingface/safetensors, "Format"). Files are checked when they are opened and read by
`pread`, not mapped: a mapped file that is truncated later kills the process instead of raising.
"""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from miles_like.limits.regular_files import MIB, check_inside, open_regular, parse_json, read_json, read_regular
from miles_like.types import NamedTensor
from quant.hf_config import MODELOPT_FILE, modelopt_file

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HEADER_ROOM = 128 << 10  # bytes reserved for a shard's header, which is known only after its data is written
_COPIED_SUFFIXES = frozenset((".json", ".jinja", ".model", ".tiktoken", ".txt", ".bpe", ".vocab", ".py"))
_NOT_COPIED = frozenset(("config.json", "manifest.json", MODELOPT_FILE, "quant_report.json"))
_TEMPLATES = "additional_chat_templates"  # transformers' folder for further chat templates
_REFETCH = "fetch the checkpoint again"
_CONFIG_BYTES, _INDEX_BYTES, _COMPANION_BYTES = 4 * MIB, 256 * MIB, 256 * MIB
_SIZES = (1, 1 << 24)
COUNTS: dict[str, tuple[int, int]] = {  # key of config.json -> (least, most); checked before tables of that size
    "num_hidden_layers": (1, 1024),
    "num_nextn_predict_layers": (0, 64),
    "first_k_dense_replace": (0, 1024),
    "n_routed_experts": (0, 1 << 16),
    "num_experts": (0, 1 << 16),
    "num_local_experts": (0, 1 << 16),
    "n_shared_experts": (0, 1 << 16),
    "num_experts_per_tok": (0, 1 << 16),
    "n_group": (0, 1 << 16),
    "topk_group": (0, 1 << 16),
    "vocab_size": (1, 1 << 31),
    "max_position_embeddings": (1, 1 << 31),
    "num_attention_heads": (1, 1 << 16),
    "num_key_value_heads": (1, 1 << 16),
    "hidden_size": _SIZES,
    "intermediate_size": _SIZES,
    "moe_intermediate_size": _SIZES,
    "head_dim": _SIZES,
    "kv_lora_rank": _SIZES,
    "q_lora_rank": _SIZES,
    "qk_nope_head_dim": (0, 1 << 24),
    "qk_rope_head_dim": (0, 1 << 24),
    "v_head_dim": _SIZES,
}


class TensorInfo(NamedTuple):
    """Where a tensor is stored. `offset`: of its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int


class HFCheckpoint:
    """A directory with config.json and model.safetensors, or the files that model.safetensors.index.json lists.

    The constructor reads and checks everything but the data, and raises ValueError naming the wrong file. No file stays
    open, so an instance can be pickled.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config: dict[str, Any] = read_config(self.path)
        self._info: dict[str, TensorInfo] = {}
        weight_map = self._weight_map()
        for file in sorted(set(weight_map.values())) if weight_map else [_SINGLE]:
            check_inside(self.path / file, self.path)
            for name, info in _read_header(self.path / file).items():
                if name in self._info:
                    raise ValueError(f"{name} is in two files, {self._info[name].file} and {info.file}: {_REFETCH}")
                self._info[name] = info
        for name, file in (weight_map or {}).items():
            if name not in self._info or self._info[name].file.name != file:
                raise ValueError(f"{self.path / INDEX} lists {name} in {file}, which does not have it: {_REFETCH}")
        for name, info in self._info.items():
            if weight_map and name not in weight_map:
                raise ValueError(f"{info.file} has {name}, which {INDEX} does not list: {_REFETCH}")

    def at(self, path: Path) -> HFCheckpoint:
        """The same checkpoint in another directory, whose files are not checked."""
        other = copy.copy(self)
        other.path = path
        other._info = {name: info._replace(file=path / info.file.name) for name, info in self._info.items()}
        return other

    def _weight_map(self) -> dict[str, str] | None:
        """Tensor name -> file name; None for a checkpoint of one file."""
        if not (self.path / INDEX).exists():
            if not (self.path / _SINGLE).exists():
                raise ValueError(
                    f"{self.path} has neither {_SINGLE} nor {INDEX}: not a safetensors checkpoint, or incomplete"
                )
            return None
        weight_map = _read_json(self.path / INDEX, _INDEX_BYTES, once=True).get("weight_map")
        if (
            not weight_map
            or not isinstance(weight_map, dict)
            or not all(isinstance(f, str) for f in weight_map.values())
        ):
            raise ValueError(f"{self.path / INDEX} has no weight_map from tensor names to files: {_REFETCH}")
        for file in sorted(set(weight_map.values())):
            if Path(file).name != file or "\0" in file or not (self.path / file).exists():
                raise ValueError(f"{self.path / file} is missing, although {INDEX} lists it: {_REFETCH}")
        if (self.path / _SINGLE).exists() and _SINGLE not in weight_map.values():  # transformers would read this one
            raise ValueError(f"{self.path / _SINGLE} is not among the files that {INDEX} lists: remove one of them")
        return weight_map

    def names(self) -> list[str]:
        """All tensor names, in the order of the files and of the data in each."""
        return list(self._info)

    def __contains__(self, name: str) -> bool:
        return name in self._info

    def info(self, name: str) -> TensorInfo:
        if name not in self._info:
            raise ValueError(f"{self.path} has no tensor {name}, but {len(self._info)} others")
        return self._info[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors' data."""
        return sum(i.nbytes for i in self._info.values())

    def read(self, name: str) -> Tensor:
        """The tensor, in new storage. Raises ValueError when the file has been truncated since it was opened."""
        info = self.info(name)
        return _pread(info, 0, info.nbytes).view(info.shape)

    def read_rows(self, name: str, a: int, b: int, buffer: memoryview | None = None) -> Tensor:
        """Rows [a, b) of the first axis; only their bytes are read and stored.

        `buffer`: writable memory that the tensor uses from its beginning on, instead of new storage.
        """
        info = self.info(name)
        if not info.shape or not 0 <= a <= b <= info.shape[0]:
            raise ValueError(f"{name} has shape {list(info.shape)} and no rows {a} to {b}")
        row = info.nbytes // max(1, info.shape[0])
        return _pread(info, a * row, (b - a) * row, buffer).view(b - a, *info.shape[1:])

    def stream(self) -> Iterator[NamedTensor]:
        """Every tensor, one at a time."""
        for name in self._info:
            yield NamedTensor(name, self.read(name))


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory. Raises ValueError when it is missing, not a JSON object, or a link that
    leads out of the directory, and for a count or size that is not within `COUNTS`."""
    path = directory / "config.json"
    config = _read_json(path, _CONFIG_BYTES)
    check_counts(config, path)
    return config


def read_config_file(path: Path) -> dict[str, Any]:
    """As `read_config`, for a file that the user names: it may have another name and be a link."""
    try:
        config: dict[str, Any] = read_json(path, _CONFIG_BYTES)
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}") from None
    except ValueError as e:
        raise ValueError(f"{path} is not JSON: {e}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object: fetch the model's again")
    check_counts(config, path)  # before a table of that many tensors is built
    return config


def check_counts(config: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError for a count or size of a config.json, read from `path`, that is not within `COUNTS`."""
    for name, (least, most) in COUNTS.items():
        value = config.get(name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise ValueError(f"{path}: {name} is {_short(value)}: expected an integer from {least:,} to {most:,}")


def generation_eos(directory: Path) -> tuple[int, ...] | None:
    """End tokens in generation_config.json of a Hugging Face directory; None: no such file, or none in it. Raises
    ValueError when it cannot be read, is a link that leads out of the directory, or holds a value that is no token."""
    path = directory / "generation_config.json"
    if not os.path.lexists(path):
        return None
    found = _read_json(path, _CONFIG_BYTES).get("eos_token_id")
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(t) is int and 0 <= t <= COUNTS["vocab_size"][1] for t in tokens):
        raise ValueError(f"{path}: eos_token_id is {_short(found)}: expected a token or a list of tokens")
    return None if found is None else tuple(tokens)


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python converts
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:60]}..."


def _read_json(path: Path, limit: int, *, once: bool = False) -> dict[str, Any]:
    """`once`: a key that occurs twice raises ValueError."""
    try:
        check_inside(path, path.parent)
        value = read_json(path, limit, _once if once else None)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: use a Hugging Face model directory") from None
    except ValueError as e:
        raise ValueError(f"{path} is not readable JSON ({e}): {_REFETCH}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object: {_REFETCH}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"{key} occurs twice")
        out[key] = value
    return out


def _entry(name: str, entry: Mapping[str, Any]) -> tuple[str, str, tuple[int, ...], int, int]:
    """(name, dtype, shape, begin, end) of a header's entry. Raises ValueError for a number that is not a whole number
    from 0 on, TypeError and KeyError for an entry of another form."""
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    for number in (*shape, begin, end):
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ValueError(f"{name} has {_short(number)} in its shape or offsets, expected integers from 0")
    return name, str(entry["dtype"]), shape, begin, end


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensor name -> place, in the order of the data. Raises ValueError when header and file length disagree."""
    with os.fdopen(open_regular(path), "rb") as f:
        size = os.fstat(f.fileno()).st_size
        length = int.from_bytes(f.read(8), "little")
        if size < 8 + length and length < 100_000_000:
            raise ValueError(f"{path} is truncated: {size} bytes, but the header alone needs {8 + length}: {_REFETCH}")
        if size < 8 or length >= 100_000_000:
            raise ValueError(f"{path} is not a safetensors file ({size} bytes): {_REFETCH}")
        raw = f.read(length)
    try:
        header = parse_json(raw, _once)
        found = (_entry(name, entry) for name, entry in header.items() if name != "__metadata__")
        entries = sorted(found, key=lambda entry: (entry[3], entry[4]))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as e:
        raise ValueError(f"{path} has no valid safetensors header ({e}): {_REFETCH}") from None
    out: dict[str, TensorInfo] = {}
    end = 0
    for name, dtype_name, shape, begin, stop in entries:
        dtype = _DTYPES.get(dtype_name)
        if dtype is None:
            raise ValueError(f"{path}: {name} has dtype {dtype_name}, but supported are {', '.join(_DTYPES)}")
        nbytes = math.prod(shape) * dtype.itemsize
        if begin != end or stop - begin != nbytes:
            raise ValueError(f"{path}: {name} {list(shape)} {dtype_name} does not fit {begin}..{stop}: {_REFETCH}")
        out[name] = TensorInfo(dtype, shape, nbytes, path, 8 + length + begin)
        end = stop
    want = 8 + length + end
    if size < want:
        raise ValueError(f"{path} is truncated: {size} of {want} bytes, {want - size} are missing: {_REFETCH}")
    if size > want:
        raise ValueError(f"{path} has {size} bytes, {size - want} more than its header describes: {_REFETCH}")
    return out


def _pread(info: TensorInfo, skip: int, nbytes: int, buffer: memoryview | None = None) -> Tensor:
    """Bytes [skip, skip + nbytes) of the tensor's data as a flat tensor of its dtype."""
    if buffer is None or not nbytes:
        flat = torch.empty(nbytes, dtype=torch.uint8)
    else:
        flat = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes)
    view = flat.numpy().data
    fd = open_regular(info.file)
    try:
        done = 0
        while done < nbytes:
            got = os.preadv(fd, [view[done:]], info.offset + skip + done)
            if not got:
                raise ValueError(f"{info.file} ended {nbytes - done} bytes early: it was truncated during the read")
            done += got
    finally:
        os.close(fd)
    return flat.view(info.dtype)


def write_hf(
    path: Path | str,
    stream: Iterable[tuple[str, Tensor]],
    config: dict[str, Any],
    *,
    copy_from: Path | str | None = None,
    shard_bytes: int = 5 << 30,
    nbytes: int | None = None,
    beside: Callable[[Path], None] | None = None,
) -> int:
    """Write a model directory; return the bytes of tensor data.

    Tensors are written as they arrive, in files of about `shard_bytes`, into `unfinished(path)`, which is renamed when
    all is on disk; on an error neither is left. `copy_from`: a model directory whose companion files are copied.
    `nbytes`, where known, is checked against the free space before. `beside`: called with the unfinished directory.
    Raises ValueError for a duplicate name, an unknown dtype or a `path` that exists, OSError when the disk is full.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists: remove it or choose another output directory")
    if copy_from is not None and not Path(copy_from).is_dir():
        raise ValueError(f"{copy_from} is not a directory, so no tokenizer can be copied from it")
    partial = unfinished(path)
    if partial.exists():
        shutil.rmtree(partial)  # left by a process that was killed
    shards = _ShardWriter(partial, shard_bytes)
    try:
        partial.mkdir(parents=True)
        if nbytes is not None and nbytes > shutil.disk_usage(partial).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for name, tensor in stream:
            shards.add(name, tensor)
        shards.finish()
        if copy_from is not None:
            for file in companions(Path(copy_from)):
                target = partial / file.relative_to(copy_from)
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(read_regular(file, _COMPANION_BYTES))
        _write_json(partial / "config.json", config)
        if (again := modelopt_file(config)) is not None:
            _write_json(partial / MODELOPT_FILE, again)
        if beside is not None:
            beside(partial)
        for file in partial.rglob("*"):
            sync_path(file)
        sync_path(partial)
        partial.replace(path)
        sync_path(path.parent)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(e.errno, _disk_full(path, shards.total, nbytes)) from e
    finally:
        shards.close()
        if partial.exists():
            shutil.rmtree(partial)
    return shards.total


def unfinished(path: Path | str) -> Path:
    """Where `write_hf` writes what becomes `path`."""
    return Path(path).with_name(Path(path).name + ".partial")


def _disk_full(path: Path, written: int, nbytes: int | None) -> str:
    free = shutil.disk_usage(path.parent).free
    need = f"it needs {nbytes} bytes" if nbytes is not None else "it needs more"
    return (
        f"disk full: {path} was not written, {need}, {written} bytes were written before {free} were left; "
        "free some space or choose a directory on another disk"
    )


class _ShardWriter:
    """Writes shards: the data first, then the header into reserved room at the start, padded with blanks."""

    def __init__(self, directory: Path, shard_bytes: int) -> None:
        self.directory = directory
        self.shard_bytes = shard_bytes
        self.headers: list[dict[str, dict[str, object]]] = []  # of each file
        self.size = self.header_bytes = 0  # of the last file
        self.names: set[str] = set()
        self.total = 0
        self._file: FileIO | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor. Raises ValueError for a duplicate name or a dtype that is not supported."""
        if name in self.names:
            raise ValueError(f"{name} occurs twice")
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name}: {tensor.dtype} is not supported: supported are {', '.join(_DTYPES)}")
        self.names.add(name)
        shape, n = list(tensor.shape), tensor.nbytes
        entry_bytes = len(json.dumps(name)) + len(str(shape)) + 96  # upper bound of its header entry
        full = self.size + n > self.shard_bytes or self.header_bytes + entry_bytes > _HEADER_ROOM
        if self._file is None or (full and self.headers[-1]):
            self._open_shard()
        self._write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        place = [self.size, self.size + n]
        self.headers[-1][name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": place}
        self.size += n
        self.header_bytes += entry_bytes
        self.total += n

    def finish(self) -> None:
        """End the last file, rename all files, and write the index where there are several."""
        if self._file is None:
            self._open_shard()  # a checkpoint without tensors has one file too
        self._end_shard()
        count = len(self.headers)
        if count == 1:
            self._part(0).rename(self.directory / _SINGLE)
            return
        weight_map = {}
        for i, header in enumerate(self.headers):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            self._part(i).rename(self.directory / file)
            weight_map.update(dict.fromkeys(header, file))
        _write_json(self.directory / INDEX, {"metadata": {"total_size": self.total}, "weight_map": weight_map})

    def close(self) -> None:
        """Close the file that is being written, unfinished."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _part(self, i: int) -> Path:
        return self.directory / f"{i:05d}.data"

    def _open_shard(self) -> None:
        if self._file is not None:
            self._end_shard()
        # unbuffered: closing the file after a failed write has nothing left to write, and cannot fail again
        self._file = self._part(len(self.headers)).open("wb", buffering=0)
        self._file.seek(_HEADER_ROOM)
        self.headers.append({})
        self.size = 0
        self.header_bytes = 64

    def _end_shard(self) -> None:
        assert self._file is not None
        header = {"__metadata__": {"format": "pt"}, **self.headers[-1]}
        raw = json.dumps(header, separators=(",", ":")).encode().ljust(_HEADER_ROOM - 8)
        assert len(raw) == _HEADER_ROOM - 8, f"a header of {len(raw)} bytes"
        self._file.seek(0)
        self._write(memoryview((_HEADER_ROOM - 8).to_bytes(8, "little") + raw))
        self.close()

    def _write(self, data: memoryview) -> None:
        assert self._file is not None
        while len(data):  # Linux writes at most 2 GiB per call
            data = data[self._file.write(data) :]


def companions(directory: Path) -> list[Path]:
    """Files to copy along with the weights, in name order: tokenizer, chat templates (also in their folder), generation
    config, model code, licence; not config.json, index and manifest, which describe the weights.

    Raises ValueError for one that is no regular file, or a link that leads out of the directory.
    """
    found = [
        file
        for file in sorted((*directory.iterdir(), *(directory / _TEMPLATES).glob("*.jinja")))
        if (file.suffix in _COPIED_SUFFIXES or file.name.startswith("LICENSE")) and not file.is_dir()
        if file.name not in _NOT_COPIED and not file.name.startswith(".")
        if not file.name.endswith((".index.json", ".safetensors.json"))
    ]
    for file in found:
        check_inside(file, directory)
        os.close(open_regular(file))
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def sync_path(path: Path) -> None:
    """fsync a file's bytes, or a directory's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

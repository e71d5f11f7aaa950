"""Parses the two formats inside a `torch_dist` directory without executing pickled code.

`.metadata` is a pickle of torch's bookkeeping classes; a chunk is a zip archive as torch.save writes it, whose data.pkl
describes one tensor. Both are unpickled with only the classes they need. In `.metadata` every other class becomes an
inert object (megatron adds each rank's plan, and its own helpers); in an archive it is an error.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as _format

UNREADABLE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    struct.error,
    EOFError,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    TypeError,
    NotImplementedError,
    UnicodeDecodeError,
)
"""Exceptions that parsing foreign bytes may raise."""


# classes of non-tensor objects in a checkpoint, in addition to those of torch's weights-only unpickler: `_extra_state`
# of megatron's modules is an empty io.BytesIO, random states may contain numpy arrays
_OBJECTS: tuple[Any, ...] = (
    io.BytesIO,
    np.ndarray,
    np.dtype,
    np.empty(0).__reduce__()[0],  # numpy's _reconstruct, which has no public name
    type(np.dtype(np.uint32)),
)


def reencoded(raw: bytes, name: str) -> bytes:
    """Read an object that torch.save wrote, without executing pickled code, and save it again: the result is safe for a
    reader that uses an unrestricted torch.load.

    Raises ValueError when `raw` is damaged or contains classes other than tensors, Python's types and `_OBJECTS`.
    """
    try:
        with torch.serialization.safe_globals(list(_OBJECTS)):
            value = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except (*UNREADABLE, RuntimeError, ValueError, OverflowError, MemoryError) as e:
        raise ValueError(f"{name} cannot be read ({reason(e)}): resume from an earlier checkpoint") from None
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def reason(error: Exception) -> str:
    """The first line of an error of torch.load, without its advice on the file's origin and on loading it with
    weights_only=False."""
    named = re.search(r"GLOBAL:? `?([\w.]+)", str(error), re.IGNORECASE)
    if "weights_only" in str(error):
        return f"it refers to {named[1] if named else 'a class'}, which does not belong in a checkpoint"
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line.partition(". ")[0] if line.startswith("PytorchStreamReader") else line


def spans(sizes: Sequence[int], inside: Sequence[int], box: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first element, elements) of each contiguous run, in a row-major array of `sizes`, of the box of shape `box` at
    `inside`, in the box's order."""
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    axis = len(sizes)  # axes from here on are whole
    while axis and box[axis - 1] == sizes[axis - 1]:
        axis -= 1
    if not axis:
        yield 0, math.prod(sizes)
        return
    run = box[axis - 1] * strides[axis - 1]
    base = sum(a * s for a, s in zip(inside, strides, strict=True))
    for index in itertools.product(*(range(n) for n in box[: axis - 1])):
        yield base + sum(i * s for i, s in zip(index, strides, strict=False)), run


def data_start(raw: Any, dtype: torch.dtype, sizes: Sequence[int]) -> int:
    """Offset in bytes of the tensor's elements in the archive `raw` (a seekable file with only the archive). Raises
    pickle.UnpicklingError when the archive holds anything but a contiguous tensor of that dtype and shape."""
    with zipfile.ZipFile(raw) as archive:
        root = archive.namelist()[0].split("/")[0]
        value = _ArchiveUnpickler(io.BytesIO(_record(archive, f"{root}/data.pkl"))).load()
        if not isinstance(value, tuple) or len(value) < 4:
            raise pickle.UnpicklingError("no tensor")
        (_, storage, record, *_), first, shape, stride = value[:4]
        if storage != dtype or tuple(shape) != tuple(sizes):
            raise pickle.UnpicklingError(f"{storage} {list(shape)}, not {dtype} {list(sizes)}")
        below = 1
        for size, step in zip(reversed(shape), reversed(stride), strict=True):
            if size != 1 and step != below:
                raise pickle.UnpicklingError(f"strides {list(stride)}: not contiguous")
            below *= size
        info = archive.getinfo(f"{root}/data/{record}")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size < (first + below) * dtype.itemsize:
            raise pickle.UnpicklingError("compressed, or too short")
        order = f"{root}/byteorder"
        if order in archive.namelist() and _record(archive, order) != b"little":
            raise pickle.UnpicklingError("not little-endian")
        raw.seek(info.header_offset + 26)
        name, extra = struct.unpack("<HH", raw.read(4))
    return int(info.header_offset) + 30 + int(name) + int(extra) + int(first) * dtype.itemsize


def _record(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if not info.CRC:
        del info.CRC  # torch wrote none (set_crc32_options), so it cannot be checked
    return archive.read(info)


# torch.save writes the names of storage classes
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "ByteStorage": torch.uint8,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
}


class _ArchiveUnpickler(pickle.Unpickler):
    """data.pkl of a tensor -> ((kind, dtype, record, ...), first element, shape, strides, ...); builds no tensor."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *args: args
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *args: tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a tensor")

    def persistent_load(self, pid: Any) -> Any:
        return pid


_CLASSES = (
    *(("torch.distributed.checkpoint.metadata", name) for name in (*_format.__all__, "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
)


class _Inert:
    """Placeholder for an object of a class that is not needed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __setstate__(self, state: Any) -> None: ...
    def append(self, value: Any) -> None: ...
    def extend(self, values: Any) -> None: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def __hash__(self) -> int:
        return id(self)


class MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in _CLASSES
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        return _Inert


class View(io.RawIOBase):
    """A read-only file of `size` bytes; `part(at, size)` returns some of them."""

    def __init__(self, size: int, part: Callable[[int, int], bytes]) -> None:
        super().__init__()
        self._size, self._part, self._at = size, part, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        got = self._part(self._at, left if size is None or size < 0 else min(size, left))
        self._at += len(got)
        return got

"""Flattened buckets: several tensors in one buffer of bytes, and how a request names the buffer. No I/O.

Stock SGLang 0.5.23 opens a buffer in shared memory or on a GPU by a pickle of its handle (srt/weight_sync/
tensor_bucket.py, srt/utils/common.py `SafeUnpickler`), the embedded engine by the name of a segment in JSON. With a
process group a request has names, dtypes and shapes only, from which both sides compute the same layout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import orjson
import pybase64
import torch
from pydantic import Field
from torch import Tensor

from miles_like.types import NamedTensor
from rollout.wire.bodies import MAX_TENSORS, Body, DtypeName, Name, Shape, read
from rollout.wire.endpoints import UPDATE_FROM_TENSOR
from rollout.wire.pickles import START, STOP, Global, Opcodes, again, called, kept, pushed

FLATTENED = "flattened_bucket"  # load_format, of stock servers
SEGMENT = "segment"  # load_format, of the embedded engine
HEADER = 64  # bytes before the tensors, of which torch keeps a number of users in the first four
SEGMENT_NAME = re.compile(r"/miles-like-[0-9a-f]{32}")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class FlatTensor(NamedTuple):
    """The place of a tensor in its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte
    nbytes: int

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


Layout = tuple[FlatTensor, ...]


def layout_of(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> Layout:
    """The places of tensors (name, dtype, shape), in their order and without gaps."""
    out, start = [], 0
    for name, dtype, shape in tensors:
        nbytes = math.prod(shape) * dtype.itemsize
        out.append(FlatTensor(name, dtype, tuple(shape), start, nbytes))
        start += nbytes
    return tuple(out)


def aligned_layout(tensors: Iterable[NamedTensor]) -> Layout:
    """As `layout_of`, those with larger elements first: each begins at a multiple of the size of its elements, which
    stock SGLang requires."""
    return layout_of((name, t.dtype, t.shape) for name, t in sorted(tensors, key=lambda n: -n.tensor.itemsize))


def flat_bytes(layout: Layout) -> int:
    return sum(t.nbytes for t in layout)


def fill(buffer: Tensor, layout: Layout, tensors: Iterable[NamedTensor]) -> None:
    """Copy the tensors to their places. buffer: [at least `flat_bytes`] uint8, on any device."""
    found = dict(tensors)
    for name, _, _, start, nbytes in layout:
        raw = found[name].detach().contiguous().reshape(-1).view(torch.uint8)
        buffer[start : start + nbytes].copy_(raw)


def separate(buffer: Tensor, layout: Layout) -> Iterator[NamedTensor]:
    """The tensors of a bucket, each with its own memory: a server that keeps one does not keep the others."""
    for name, dtype, shape, start, nbytes in layout:
        yield NamedTensor(name, buffer[start : start + nbytes].clone().view(dtype).reshape(shape))


def dtype_of(name: str) -> torch.dtype:
    """Raises ValueError for a dtype that the embedded engine does not read."""
    if (dtype := _DTYPES.get(name)) is None:
        raise ValueError(f"weights have dtype {name[:60]!r}, which this server does not support")
    return dtype


# ---- a segment of shared memory, for the embedded engine


class _Entry(Body):
    name: Name
    dtype: DtypeName
    shape: Shape
    start: Annotated[int, Field(ge=0, le=2**48)]


class _SegmentBody(Body):
    segment: Annotated[str, Field(max_length=64)]
    tensors: Annotated[list[_Entry], Field(fail_fast=True, min_length=1, max_length=MAX_TENSORS)]


def encode_segment(segment: str, layout: Layout) -> str:
    """JSON with the name of the segment and the places of its tensors, from its byte HEADER on."""
    entries = [{"name": t.name, "dtype": t.dtype_name, "shape": t.shape, "start": t.start} for t in layout]
    return orjson.dumps({"segment": segment, "tensors": entries}).decode()


def decode_segment(text: str) -> tuple[str, Layout]:
    """The inverse of `encode_segment`. Raises ValueError for what is not its result. The segment's size is not known
    here."""
    try:
        body = orjson.loads(text)
    except ValueError as e:
        raise ValueError(f"{UPDATE_FROM_TENSOR}: the description of a segment is not JSON: {e}") from None
    given = read(_SegmentBody, body, UPDATE_FROM_TENSOR)
    if not SEGMENT_NAME.fullmatch(given.segment):
        raise ValueError(
            f"{UPDATE_FROM_TENSOR}: segment = {given.segment!r} is not the name of a publisher's segment, "
            "/miles-like- and 32 hexadecimal digits"
        )
    out = []
    for t in given.tensors:
        dtype = dtype_of(t.dtype)
        out.append(FlatTensor(t.name, dtype, tuple(t.shape), t.start, math.prod(t.shape) * dtype.itemsize))
    return given.segment, tuple(out)


# ---- handles, for stock SGLang

_METADATA = Global("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
_REDUCTIONS = "torch.multiprocessing.reductions"


def encode_memory_handle(segment: str, layout: Layout) -> str:
    """Base64 of the pickle by which a rank opens the segment, as with torch's sharing strategy "file_system".

    No manager of torch is named, so that a reader starts one for itself. A reader removes no segment whose header
    counts more users than there are readers.
    """
    nbytes = flat_bytes(layout)
    kind, name = Global("torch.storage", "UntypedStorage"), segment.encode()
    storage = called(Global(_REDUCTIONS, "rebuild_storage_filename"), kind, b"", name, nbytes)
    typed = called(Global(_REDUCTIONS, "rebuild_typed_storage"), storage, torch.uint8)
    place = (0, (nbytes,), (1,), False)  # offset, shape, stride, no gradient
    return _bucket_pickle(called(Global(_REDUCTIONS, "rebuild_tensor"), torch.Tensor, typed, place), layout)


def encode_cuda_handle(arguments: Sequence[Any], layout: Layout) -> str:
    """Base64 of the pickle by which a rank opens memory of a GPU of its host. It can be opened once.

    arguments: those that torch's `reduce_tensor` gives for a flat CUDA tensor, with the UUID of its device in place of
    the device's number, which differs between processes.
    """
    rebuild = Global("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified")
    return _bucket_pickle(called(rebuild, *arguments), layout)


def _bucket_pickle(tensor: Opcodes, layout: Layout) -> str:
    metadata = []
    for i, t in enumerate(layout):
        made = kept(_METADATA) if i == 0 else again()
        metadata.append(called(made, t.name, t.shape, t.dtype, t.start, t.start + t.nbytes, t.nbytes))
    parts = (b"}(", pushed("flattened_tensor"), tensor, pushed("metadata"), b"](", *metadata, b"eu")
    return pybase64.b64encode_as_string(START + b"".join(parts) + STOP)

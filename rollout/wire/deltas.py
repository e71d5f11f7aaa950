"""Exact differences between two versions of a stored tensor, and the directory of a publication that consists of them.

A difference is bytes: a header with dtype, shape and the hashes of both versions, then a body of one of four kinds. All
of them give the new tensor bit for bit:

    same    nothing; the versions are equal
    sparse  positions of the elements that differ, as distances, and the XOR of old and new bits there
    dense   the XOR of all elements
    whole   the bytes of the new tensor, which needs no old one

Bodies of the first three are byte planes (all first bytes, then all second bytes, ...) in one zstd frame: small
distances and small changes have zeros in their high bytes. The encoder takes the smallest kind that is smaller than
`whole`.

A directory of differences is one of `miles_like/hf/checkpoint.py` whose tensors are these bytes under their stored
names, every tensor of the model among them. Its config.json has only the versions (`DeltaConfig`), so that it is never
taken for a model.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import xxhash
import zstandard
from pydantic import Field, ValidationError
from torch import Tensor

from rollout.wire.bodies import MAX_VERSION, Body

DELTA = "delta"  # load_format of a directory of differences
LEVEL = 1  # of zstd
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.uint8,
    torch.int32,
    torch.int64,
)
# codes that are packed into larger words change one by one: their bytes are compared
_WIDTHS = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
_GAP = 4  # bytes of a distance
_MAX_DIMS = 8
_HEAD = struct.Struct("<BBBxIQ16s16s")  # kind, dtype, dimensions, version of this format, elements that differ, hashes
_FORMAT = 1


class Kind(IntEnum):
    SAME = 0
    SPARSE = 1
    DENSE = 2
    WHOLE = 3


class DeltaConfig(Body):
    """The object "delta" in the config.json of a directory of differences."""

    format: Literal[1] = 1
    base: str = Field(max_length=MAX_VERSION)  # weight version that the differences are applied to
    version: str = Field(max_length=MAX_VERSION)  # weight version that they give

    @classmethod
    def of(cls, config: Mapping[str, Any], where: object) -> DeltaConfig:
        """Raises ValueError unless `config` is that of a directory of differences."""
        try:
            return cls.model_validate(config.get(DELTA))
        except ValidationError as e:
            error = e.errors()[0]
            at = ".".join(map(str, (DELTA, *error["loc"])))
            raise ValueError(
                f"config.json in {where} does not describe weight differences: {at}: {error['msg']}"
            ) from None

    def to_json(self) -> dict[str, Any]:
        return {DELTA: self.model_dump()}


class Encoded(NamedTuple):
    """kind: of `payload`. changed: bytes of the new tensor that differ from the old one's, all without an old one."""

    payload: bytes
    kind: Kind
    changed: int


def content_hash(tensor: Tensor) -> bytes:
    """16 bytes: XXH3 of a CPU tensor's bytes."""
    t = tensor.detach().contiguous()
    # not through an array: memory that one refers to, a parameter's, could never be resized again
    return xxhash.xxh3_128_digest((ctypes.c_char * t.nbytes).from_address(t.data_ptr()) if t.nbytes else b"")


def encode_delta(old: Tensor | None, old_hash: bytes, new: Tensor, new_hash: bytes) -> Encoded:
    """The difference that turns `old` into `new`, CPU tensors with their `content_hash`; None: there is no old version.

    Takes memory of about two times the tensor.
    """
    if old is not None and (old.dtype is not new.dtype or old.shape != new.shape):
        old = None
    if old is None:
        return Encoded(_headed(Kind.WHOLE, 0, new, bytes(16), new_hash, _bytes(new)), Kind.WHOLE, new.nbytes)
    if old_hash == new_hash:
        return Encoded(_headed(Kind.SAME, 0, new, old_hash, new_hash, b""), Kind.SAME, 0)
    bits = np.bitwise_xor(_words(old), _words(new))
    differs = bits != 0
    count = int(np.count_nonzero(differs))
    changed = int(np.count_nonzero(bits.view(np.uint8)))
    if count * (_GAP + bits.itemsize) < new.nbytes and bits.size < 1 << 32:
        at = np.flatnonzero(differs)
        planes, kind = _planes(np.diff(at, prepend=0).astype("<u4")) + _planes(bits[at]), Kind.SPARSE
    else:
        planes, kind = _planes(bits), Kind.DENSE
    body = zstandard.ZstdCompressor(level=LEVEL).compress(planes)
    if len(body) >= new.nbytes:
        return Encoded(_headed(Kind.WHOLE, 0, new, bytes(16), new_hash, _bytes(new)), Kind.WHOLE, changed)
    return Encoded(_headed(kind, count, new, old_hash, new_hash, body), kind, changed)


class Delta:
    """A difference that was received. Raises ValueError naming the tensor `name` where its header is not valid."""

    def __init__(self, name: str, payload: Tensor) -> None:
        """payload: uint8 [n]."""
        self.name = name
        if payload.dtype is not torch.uint8 or payload.dim() != 1 or payload.numel() < _HEAD.size:
            raise ValueError(
                f"{name}: {list(payload.shape)} {payload.dtype} is not a weight difference: it has no header"
            )
        raw = payload.numpy().data
        kind, dtype, dims, version, self.count, self.old_hash, self.new_hash = _HEAD.unpack_from(raw)
        start = _HEAD.size + 8 * dims
        if version != _FORMAT or kind > max(Kind) or dtype >= len(_DTYPES) or dims > _MAX_DIMS or len(raw) < start:
            raise ValueError(
                f"{name}: the header of its weight difference is not valid (format {version}, kind {kind})"
            )
        self.kind, self.dtype = Kind(kind), _DTYPES[dtype]
        self.shape: tuple[int, ...] = struct.unpack_from(f"<{dims}Q", raw, _HEAD.size)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self._body = raw[start:]

    def applied(self, old: Tensor) -> Tensor:
        """The new tensor, in new memory, or `old` where it is equal. Raises ValueError, before memory of more than
        twice the old tensor is taken, where `old` is not the one that the difference was made of, and for a body that
        is damaged."""
        if self.dtype is not old.dtype or self.shape != tuple(old.shape):
            raise ValueError(
                f"{self.name}: the weight difference has {self.dtype} {list(self.shape)}, but this server holds "
                f"{old.dtype} {list(old.shape)}"
            )
        if self.kind is Kind.WHOLE:
            return self._checked(self._whole())
        if content_hash(old) != self.old_hash:
            raise ValueError(
                f"{self.name}: the weight difference was computed from values that this server does not hold: publish "
                "the whole weights"
            )
        if self.kind is Kind.SAME:
            return self._checked(old)
        new = old.clone(memory_format=torch.contiguous_format)
        words = _words(new)
        if self.kind is Kind.DENSE:
            words ^= _from_planes(self._decompressed(new.nbytes), words.dtype)
        else:
            self._scatter(words)
        return self._checked(new)

    def _whole(self) -> Tensor:
        if len(self._body) != self.nbytes:
            raise ValueError(f"{self.name}: {len(self._body)} bytes instead of the {self.nbytes} of the whole tensor")
        flat = torch.from_numpy(np.frombuffer(self._body, np.uint8).copy())
        return flat.view(self.dtype).view(self.shape)

    def _scatter(self, words: np.ndarray) -> None:
        gaps = _GAP * self.count
        if gaps + self.count * words.itemsize >= max(1, words.nbytes):
            raise ValueError(
                f"{self.name}: {self.count} of {words.size} elements differ, more than a weight difference can have"
            )
        planes = self._decompressed(gaps + self.count * words.itemsize)
        at = np.cumsum(_from_planes(planes[:gaps], np.dtype("<u4")), dtype=np.int64)
        if self.count and at[-1] >= words.size:
            raise ValueError(
                f"{self.name}: the weight difference has element {at[-1]}, outside of {words.size} elements"
            )
        words[at] ^= _from_planes(planes[gaps:], words.dtype)

    def _decompressed(self, nbytes: int) -> bytes:
        """The planes, which have `nbytes` bytes. The frame's own size is compared first: zstd allocates it."""
        try:
            size = zstandard.frame_content_size(self._body)
            if size != nbytes:
                raise ValueError(f"{self.name}: the weight difference unpacks to {size} bytes instead of {nbytes}")
            return zstandard.ZstdDecompressor().decompress(self._body, max_output_size=nbytes, allow_extra_data=False)
        except zstandard.ZstdError as e:
            raise ValueError(f"{self.name}: the weight difference is damaged: {e}") from None

    def _checked(self, new: Tensor) -> Tensor:
        if content_hash(new) != self.new_hash:
            raise ValueError(f"{self.name}: the weight difference is damaged: its values do not match their hash")
        return new


def _headed(kind: Kind, count: int, new: Tensor, old_hash: bytes, new_hash: bytes, body: bytes | memoryview) -> bytes:
    if new.dtype not in _DTYPES or new.dim() > _MAX_DIMS:
        raise ValueError(
            f"a weight difference of {new.dtype} {list(new.shape)} cannot be written: its dtype or its number of "
            "dimensions is not supported"
        )
    head = _HEAD.pack(kind, _DTYPES.index(new.dtype), new.dim(), _FORMAT, count, old_hash, new_hash)
    return b"".join((head, struct.pack(f"<{new.dim()}Q", *new.shape), body))


def _words(tensor: Tensor) -> np.ndarray:
    """[n] unsigned integers that share the memory of a contiguous CPU tensor."""
    width = _WIDTHS.get(tensor.dtype, 1)
    return np.frombuffer(_bytes(tensor), dtype=f"<u{width}") if tensor.nbytes else np.empty(0, f"<u{width}")


def _bytes(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def _planes(words: np.ndarray) -> bytes:
    return words.view(np.uint8).reshape(-1, words.itemsize).T.tobytes()


def _from_planes(planes: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    bytewise = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1)
    out: np.ndarray = np.ascontiguousarray(bytewise.T).view(dtype).reshape(-1)
    return out

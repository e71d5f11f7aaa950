"""What a rank of stock SGLang makes of a flattened bucket, without SGLang and without a manager process of torch."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

HEADER = 64  # bytes of torch's in a shared file


class Metadata(NamedTuple):
    """FlattenedTensorMetadata of sglang/srt/weight_sync/tensor_bucket.py."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def mapped(kind: type, manager: bytes, name: bytes, size: int) -> torch.UntypedStorage:
    """In place of torch's `rebuild_storage_filename`."""
    assert kind is torch.storage.UntypedStorage and manager == b""
    raw = Path("/dev/shm", name.decode()[1:]).read_bytes()
    assert len(raw) >= HEADER + size and int.from_bytes(raw[:4], "little") > 1 << 20, "a reader would remove it"
    return torch.frombuffer(bytearray(raw[HEADER : HEADER + size]), dtype=torch.uint8).untyped_storage()


def cuda_memory(*arguments: Any) -> Tensor:
    """In place of SGLang's `_rebuild_cuda_tensor_modified`: the device is the one with the UUID."""
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    rebuild: Callable[..., Tensor] = reductions.rebuild_cuda_tensor
    return rebuild(*arguments[:6], uuids.index(arguments[6]), *arguments[7:])


STAND_INS = {
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): Metadata,
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): cuda_memory,
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"): mapped,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return STAND_INS.get((module, name)) or super().find_class(module, name)


def opened(payload: str) -> list[tuple[str, Tensor]]:
    """The tensors of one entry of `serialized_named_tensors` with load_format "flattened_bucket"."""
    bucket = _Unpickler(io.BytesIO(base64.b64decode(payload))).load()
    flat = bucket["flattened_tensor"]
    assert flat.dtype is torch.uint8 and flat.dim() == 1
    return [(m.name, flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape)) for m in bucket["metadata"]]

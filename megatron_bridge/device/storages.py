"""Device storages of tensors: found once, however many tensors share them, freed and restored in place.

A storage is resized to 0 bytes and later to its old size. Tensors and views keep their shapes and their sharing, so
that no other reference to them has to know: parameters that are views of a buffer, tied weights, shards of an
optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron_bridge.device.host_memory import buffer_bytes, parts


def storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """The storages of `tensors` on `device`, each once, by address of the storage object."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        for plain in _plain(tensor):
            if plain.device.type == device.type:
                storage = plain.untyped_storage()
                found.setdefault(storage._cdata, storage)
    return found


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or those that a subclass (TransformerEngine's quantized weights) is made of: its own storage is not
    real."""
    inner = [x for x in vars(tensor).values() if isinstance(x, Tensor)] if hasattr(tensor, "_data") else []
    for x in inner:
        yield from _plain(x)
    if not inner:
        yield tensor


class StorageSet:
    """Storages that are freed and restored together.

    kept: their contents are copied to the host; otherwise they are zeros after `restore`.
    """

    def __init__(self, found: Iterable[torch.UntypedStorage], *, kept: bool) -> None:
        self._kept = kept
        self._storages = [(storage, storage.nbytes()) for storage in found if storage.nbytes()]
        self._host: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes on the device while the storages are allocated."""
        return sum(size for _, size in self._storages)

    @property
    def host_nbytes(self) -> int:
        """Bytes of the host buffer for their contents."""
        return buffer_bytes(size for _, size in self._storages) if self._kept else 0

    def free(self, host: Tensor) -> None:
        """Copies the contents into `host`, [host_nbytes] uint8, if they are kept, and resizes the storages to 0 bytes.
        Raises RuntimeError, before anything is freed, for memory that a numpy array refers to."""
        if any(not storage.resizable() for storage, _ in self._storages):
            raise RuntimeError(
                "memory of the trainer cannot be freed, because a numpy array shares it (tensor.numpy()): copy "
                "that tensor first"
            )
        if self._kept:
            self._host = parts(host, [size for _, size in self._storages])
            for (storage, _), copy in zip(self._storages, self._host, strict=True):
                copy.copy_(_bytes(storage), non_blocking=True)
            self._synchronize()
        self.free_again()

    def free_again(self) -> None:
        """As `free`, for contents that have not changed since: nothing is copied."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocates the storages and restores their contents."""
        for i, (storage, size) in enumerate(self._storages):
            storage.resize_(size)
            raw = _bytes(storage)
            if self._kept:
                raw.copy_(self._host[i], non_blocking=True)
            else:
                raw.zero_()
        self._synchronize()

    def _synchronize(self) -> None:
        if self._storages and self._storages[0][0].device.type == "cuda":
            torch.cuda.synchronize()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """A tensor of all bytes of the storage, which shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

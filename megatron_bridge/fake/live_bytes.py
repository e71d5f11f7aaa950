"""Bytes of tensors that are alive, by part of a trainer and by phase, on the device and on the host.

Every storage that an operator returns is counted from then until the last tensor that refers to it is gone. Real
tensors and fake ones are counted alike. What no operator returns is not counted: scratch memory inside kernels, an
allocator's rounding and fragmentation, contexts and communication libraries.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PINNED = "pinned rounding"  # host part: what pinned allocations take beyond their tensors
_DEVICE = torch.ops.prim.device.default
_PIN = torch.ops.aten._pin_memory.default


class _Storage:
    """One storage that is alive; `extra`: bytes that its allocation takes beyond it."""

    __slots__ = ("extra", "nbytes", "on_host", "part", "reference")

    def __init__(self, nbytes: int, part: str, on_host: bool) -> None:
        self.nbytes, self.part, self.on_host = nbytes, part, on_host
        self.extra = 0
        self.reference: Any = None


class _Sums:
    """Bytes by part, their total, and the parts when it was largest."""

    def __init__(self) -> None:
        self.parts: dict[str, int] = {}
        self.total = self.highest = 0
        self.at_highest: dict[str, int] = {}

    def add(self, part: str, nbytes: int) -> None:
        self.parts[part] = self.parts.get(part, 0) + nbytes
        self.total += nbytes
        if self.total > self.highest:
            self.highest, self.at_highest = self.total, dict(self.parts)

    def begin(self) -> None:
        """Forget the highest total so far."""
        self.highest, self.at_highest = self.total, dict(self.parts)


def allocated_pinned(nbytes: int) -> int:
    """Bytes that torch allocates for a pinned tensor: the next power of two, at every size by default
    (CachingHostAllocator of torch 2.13, `pinned_max_round_threshold`)."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered.

    host: the type of devices whose storages are the host's; None: storages made inside of `on_host` are.
    """

    def __init__(self, *, host: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._host_type = host
        self._part, self._on_host = "other", False
        self._storages: dict[int, _Storage] = {}
        self._device, self._host = _Sums(), _Sums()

    # ---- what is alive

    @property
    def device(self) -> dict[str, int]:
        """Bytes on the device, by part."""
        return _filled(self._device.parts)

    @property
    def host(self) -> dict[str, int]:
        """Bytes on the host, by part."""
        return _filled(self._host.parts)

    def begin_phase(self) -> None:
        """From here on `peak` and `host_peak` are of the new phase."""
        self._device.begin()
        self._host.begin()

    @property
    def peak(self) -> dict[str, int]:
        """Bytes on the device by part, when their sum was largest in this phase."""
        return _filled(self._device.at_highest)

    @property
    def host_peak(self) -> dict[str, int]:
        """Bytes on the host by part, when their sum was largest in this phase."""
        return _filled(self._host.at_highest)

    # ---- attribution

    @contextmanager
    def part(self, name: str, *, unless: Iterable[str] = ()) -> Iterator[None]:
        """Storages that are made inside belong to `name`, except within the parts `unless`."""
        before = self._part
        if before not in unless:
            self._part = name
        try:
            yield
        finally:
            self._part = before

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Storages that are made inside are the host's, whatever their device."""
        before, self._on_host = self._on_host, True
        try:
            yield
        finally:
            self._on_host = before

    def assign(self, tensors: Iterable[Tensor], part: str) -> None:
        """The storages of `tensors` belong to `part`."""
        for tensor in tensors:
            found = self._storages.get(tensor.untyped_storage()._cdata)
            if found is not None and found.part != part:
                sums = self._sums(found)
                sums.add(found.part, -found.nbytes)
                found.part = part
                sums.add(part, found.nbytes)

    def measure(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that was resized with its new size."""
        found = self._storages.get(storage._cdata)
        if found is not None and (more := storage.nbytes() - found.nbytes):
            found.nbytes += more
            self._sums(found).add(found.part, more)

    # ---- counting

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # asked by C++ code several times for each operator
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        pinned = func is _PIN or bool(kwargs and kwargs.get("pin_memory"))
        if isinstance(out, Tensor):
            self._see(out, pinned)
        elif isinstance(out, list | tuple):
            for x in out:
                if isinstance(x, Tensor):
                    self._see(x, pinned)
        return out

    def _see(self, tensor: Tensor, pinned: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._storages.get(key)
        if found is not None:
            if found.nbytes != storage.nbytes():
                self.measure(storage)
            return
        on_host = self._on_host or tensor.device.type == self._host_type
        new = self._storages[key] = _Storage(storage.nbytes(), self._part, on_host)
        new.reference = weakref.ref(storage, lambda _: self._gone(key))
        self._sums(new).add(new.part, new.nbytes)
        if pinned:
            new.extra = allocated_pinned(new.nbytes) - new.nbytes
            self._host.add(PINNED, new.extra)

    def _gone(self, key: int) -> None:
        gone = self._storages.pop(key, None)
        if gone is not None:
            self._sums(gone).add(gone.part, -gone.nbytes)
            if gone.extra:
                self._host.add(PINNED, -gone.extra)

    def _sums(self, storage: _Storage) -> _Sums:
        return self._host if storage.on_host else self._device


def _filled(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: nbytes for name, nbytes in parts.items() if nbytes}

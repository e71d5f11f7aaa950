"""CUDA tensors on a machine without a device: they say `cuda:0`, and a CPU tensor inside computes their values.

Code for a device runs to its end with real numbers, so its results can be compared with the CPU's. What would make the
host wait for a device, or is an error there, raises `DeviceError` naming the place: numbers that are read (`.item()`,
`.tolist()`, `bool()`, shapes that depend on values), copies between host and device other than those of the places that
`Pretended` allows, and operations on tensors of both.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from quant.kernels.choice import VARIABLE

CUDA = torch.device("cuda", 0)
_META = torch.device("meta")
_aten = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
# the size of what they return depends on values, or they read one
_WAIT = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "equal",
    "repeat_interleave",
}
SHIMS = "megatron_bridge.device.shims"  # wraps functions of torch in a process that has had a trainer
_FROM_INDEX = {"index", "index_put_", "index_put", "_index_put_impl_"}  # with a mask they count its elements


class DeviceError(AssertionError):
    """What a device would be waited for, or what it refuses."""


class PretendedCuda(Tensor):
    """`on_host`: the CPU tensor that it stands for."""

    on_host: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendedCuda:
        # torch's C++ code, which has no CUDA here, takes it for a meta tensor
        with torch.inference_mode(False):  # a view of weights, which are not of inference, is not either
            out: PretendedCuda = Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=_META,
            )
        out.on_host = inner
        return out

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendedCuda({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise DeviceError(f"{func} on a pretended device tensor outside of `pretended`")


class Pretended(TorchDispatchMode):
    """sends, fetches: (module, function) where host tensors may go to the device, from pinned memory, and come from it.
    `waits` counts the fetches."""

    def __init__(self, sends: set[tuple[str, str]], fetches: set[tuple[str, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sends, self.fetches = sends, fetches
        self._unchecked = False
        self.waits: Counter[str] = Counter()
        self.pinned: set[int] = set()  # addresses of storages

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Inside, everything is allowed, as in the loading of weights."""
        self._unchecked = True
        try:
            yield
        finally:
            self._unchecked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _composite(func.name()):  # in inference mode it comes whole
            with self:
                return func.decompose(*args, **kwargs)
        flat = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        ours = [t for t in flat if isinstance(t, PretendedCuda)]
        to = kwargs.get("device")
        made_there = to is not None and torch.device(to).type in ("cuda", "meta")
        if func in _COPIES:
            return self._copied(func, args, kwargs, made_there)
        name = func.overloadpacket._qualified_op_name.partition("::")[2]
        if ours and not self._unchecked:
            self._check(func, name, flat, ours)
        pin = kwargs.pop("pin_memory", False)
        if made_there:
            kwargs["device"] = torch.device("cpu")
        out = func(*_inner(args), **_inner(kwargs))
        if pin:
            self.pinned.add(out.untyped_storage().data_ptr())
        if not ours and not made_there:
            return out
        return _same_or_wrapped(func, args, kwargs, out)

    def _check(self, func: Any, name: str, flat: list[Tensor], ours: list[PretendedCuda]) -> None:
        if name in _WAIT:
            raise DeviceError(f"{_place()} waits for the device: {func}")
        mask = name in _FROM_INDEX and any(t.dtype in (torch.bool, torch.uint8) for t in flat[1:])
        if mask and (name != "index_put_" or flat[-1].dim()):
            raise DeviceError(f"{_place()} waits for the device: {func} with a mask")
        if other := [t for t in flat if not isinstance(t, PretendedCuda) and (t.dim() or name in _FROM_INDEX)]:
            raise DeviceError(
                f"{_place()} has a host tensor {list(other[0].shape)} in an operation of the device: {func}"
            )

    def _copied(self, func: Any, args: Any, kwargs: Any, made_there: bool) -> Any:
        if func is _aten.copy_.default:
            source, target = args[1], args[0]
            there = isinstance(target, PretendedCuda)
        else:
            source, target = args[0], None
            there = made_there or (kwargs.get("device") is None and isinstance(source, PretendedCuda))
        here = isinstance(source, PretendedCuda)
        if here != there and (source.dim() or here) and not self._unchecked:
            self._check_copy(source, target, to_device=there)
        if made_there:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        out = func(*_inner(args), **_inner(kwargs))
        if target is not None:
            return target
        if here != there and out.untyped_storage().data_ptr() == _inner(source).untyped_storage().data_ptr():
            out = out.clone()  # on a device it is a copy
        return PretendedCuda(out) if there else out

    def _check_copy(self, source: Tensor, target: Tensor | None, *, to_device: bool) -> None:
        place = _place()
        if to_device:
            if place not in self.sends:
                raise DeviceError(f"{place} copies a host tensor {list(source.shape)} to the device")
            if source.untyped_storage().data_ptr() not in self.pinned:
                raise DeviceError(f"{place} copies pageable memory {list(source.shape)} to the device")
            return
        if place not in self.fetches:
            raise DeviceError(f"{place} waits for the device: it copies {list(source.shape)} to the host")
        if target is None or target.untyped_storage().data_ptr() not in self.pinned:
            raise DeviceError(f"{place} copies {list(source.shape)} to pageable memory")
        self.waits[place[1]] += 1


@functools.cache
def _composite(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def _inner(tree: Any) -> Any:
    return tree_map(lambda t: t.on_host if isinstance(t, PretendedCuda) else t, tree)


def _same_or_wrapped(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """The results on the device; what is written to is the argument itself."""
    written = [
        args[i] if i < len(args) else kwargs.get(a.name)
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    if written and func._schema.returns and func._schema.returns[0].alias_info is not None:
        return written[0] if len(written) == 1 else tuple(written)
    return tree_map(lambda t: PretendedCuda(t) if isinstance(t, Tensor) else t, out)


def _place() -> tuple[str, str]:
    """(module, function) of the innermost frame outside of torch and this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module not in (__name__, "torch", SHIMS) and not module.startswith(("torch.", "contextlib")):
            break
        frame = frame.f_back
    while frame.f_code.co_name.startswith("<") and frame.f_back is not None:  # a comprehension
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")), frame.f_code.co_name


class _Event:
    def record(self) -> None: ...
    def synchronize(self) -> None: ...


@contextmanager
def pretended(sends: set[tuple[str, str]], fetches: set[tuple[str, str]]) -> Iterator[Pretended]:
    """Inside, `cuda:0` is a device."""
    mode = Pretended(sends, fetches)
    with (
        patch.dict("os.environ", {VARIABLE: "0"}),  # a pretended device has no compute capability
        patch("torch.cuda._lazy_init", lambda: None),
        patch("torch.cuda.is_available", lambda: True),
        patch("torch.cuda.is_initialized", lambda: False),
        patch("torch.cuda.Event", _Event),
        mode,
    ):
        yield mode

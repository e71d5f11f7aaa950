"""Fake tensors of one rank: shapes, dtypes and devices without memory, on a build of torch for CPUs.

A fake CUDA tensor says "cuda:0" to Python. To torch's C++ code, which has no CUDA here and would end the process where
autograd asks for a stream, it says "meta"; where that code passes this device on, as in gradients of casts, the tensor
is made on the rank's device.

A number that is read from a fake tensor does not exist. `READS` lists the only places that may read one, and what they
get; any other place is an error that names it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")
_CUDA = torch.device("cuda", 0)

# (module, function) that reads a number -> what it gets: weights and gradients are finite, a step has tokens
READS: dict[tuple[str, str], float] = {
    ("megatron.core.optimizer.clip_grads", "get_grad_norm_fp32"): 1.0,
    ("megatron.core.distributed.finalize_model_grads", "finalize_model_grads"): 1.0,
    ("megatron.core.transformer.attention", "custom_forward"): 1.0,  # a kind of mask, which packs do not use
    ("megatron_bridge.optim.optimizer", "prime_state"): 0.0,
    ("megatron_bridge.step.replay_hook", "agreement"): 1.0,  # experts of a sample's routes
    ("quant.formats.codec", "_refuse"): 0.0,  # no weight is damaged
    ("quant.formats.e4m3", "within_e4m3"): 1.0,
    ("quant.formats.codec", "_tops"): 1.0,
    ("quant.qat", "fake_activations"): 1.0,
}
_STATE = ("fake_mode", "constant", "real_tensor", "pytype", "dispatch_keys")  # of a fake tensor itself, with "_..."


def seen_by_cpp(tensor: FakeTensor) -> torch.device | None:
    """The device that C++ code sees instead of a fake CUDA tensor's; None for other tensors."""
    fake = tensor.fake_device.type == "cuda" and not tensor.fake_mode.in_kernel_invocation
    return _META if fake else None


class RankMode(FakeTensorMode):
    """The mode in which one rank's code runs. device: the rank's, "cpu" or "cuda:0"."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.rank_device = device
        self._true: int | None = None  # elements that are true in the masks that are read next

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return seen_by_cpp(args[0]) or args[0].device
        if kwargs.get("device") == _META:
            kwargs["device"] = self.rank_device
        if func is _aten._local_scalar_dense.default:
            return _read(args[0])
        if func is _aten._pin_memory.default:
            return super().dispatch(_aten.clone.default, types, args[:1], {})
        if func is _aten.masked_select.default:
            with self:
                return args[0].new_empty(self._count(func))
        if func is _aten.nonzero.default:
            with self:
                return args[0].new_empty((self._count(func), args[0].dim()), dtype=torch.int64)
        return super().dispatch(func, types, args, kwargs)

    @contextmanager
    def true_elements(self, count: int) -> Iterator[None]:
        """Inside, masks are taken to have `count` true elements."""
        before, self._true = self._true, count
        try:
            yield
        finally:
            self._true = before

    def _count(self, func: Any) -> int:
        if self._true is None:
            raise ValueError(f"{func} in {_caller()[1]}: the number of true elements of a fake mask is unknown here")
        return self._true

    def of(self, real: Tensor) -> Tensor:
        """A fake tensor on the rank's device with the shape and dtype of `real`."""
        with self:
            return torch.empty(real.shape, dtype=real.dtype, device=self.rank_device)


def _caller() -> tuple[str, str]:
    """(module, function) of the innermost frame outside of torch's dispatch and of this package."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        module = str(frame.f_globals.get("__name__", ""))
        inner = module.startswith(("torch.", "megatron_bridge.fake.")) and not module.startswith("torch.optim.")
        if not inner and module != "torch":
            break
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__", ""))
    while frame.f_code.co_name.startswith("<") and frame.f_back is not None:  # a comprehension
        frame = frame.f_back
    return module, frame.f_code.co_name


def _read(tensor: Tensor) -> float | int | bool:
    place = _caller()
    if place not in READS:
        raise ValueError(
            f"{place[0]}.{place[1]} reads a number from a fake tensor {list(tensor.shape)}, whose value does not "
            "exist: replace that function with a substitute of megatron_bridge.fake"
        )
    value = READS[place]
    return value if tensor.is_floating_point() else bool(value) if tensor.dtype is torch.bool else int(value)


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called outside of the mode: the tensors that it makes are real and have values."""

    def real(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return real


def apply_to_module(self: torch.nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
    """torch.nn.Module._apply for fake tensors, of which the stock method would exchange the Python objects, which it
    refuses where something else refers to them. Attributes of parameters are kept, as they are by the stock method."""
    if recurse:
        for child in self.children():
            child._apply(fn)
    for name, old in list(self._parameters.items()):
        if old is not None and (new := _changed(fn, old)) is not None:
            self._parameters[name] = _with_attributes(torch.nn.Parameter(new, old.requires_grad), old)
    for name, buffer in list(self._buffers.items()):
        if buffer is not None and (new := _changed(fn, buffer)) is not None:
            self._buffers[name] = _with_attributes(new, buffer)
    return self


def _changed(fn: Callable[[Tensor], Tensor], old: Tensor) -> Tensor | None:
    with torch.no_grad():
        new = fn(old)
    return None if new is old or (new.dtype == old.dtype and new.device == old.device) else new


def _with_attributes(new: Any, old: Tensor) -> Any:
    for name, value in vars(old).items():
        if name.lstrip("_") not in _STATE and not name.startswith("_"):
            with suppress(AttributeError):
                setattr(new, name, value)
    return new


# ---- what Python code asks of a CUDA tensor


def is_cuda(self: FakeTensor) -> bool:
    return self.fake_device.type == "cuda"


def to_cuda(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.Tensor.cuda: returns a tensor that is on the device unchanged."""

    def cuda(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _on_device(self, _CUDA)

    return cuda


def to_device(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.Tensor.to: no copy for a tensor that is on the device already."""

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target = args[0] if args else kwargs.get("device")
        if isinstance(target, Tensor):
            return to(self, target.device, target.dtype)
        if not isinstance(target, str | torch.device) or torch.device(target).type != "cuda":
            return stock(self, *args, **kwargs)
        given = dict(zip(("device", "dtype", "non_blocking", "copy"), args, strict=False)) | kwargs
        moved = _on_device(self, _CUDA)
        dtype = moved.dtype if given.get("dtype") is None else given["dtype"]
        return stock(moved, dtype, copy=bool(given.get("copy")) and moved is self)

    return to


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    moved: Tensor = _aten._to_copy.default(tensor, device=device)
    return moved


def type_name(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch.Tensor.type: megatron's optimizers compare the name with those of CUDA's types."""

    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = stock(self, *args, **kwargs)
        if not isinstance(name, str) or args or kwargs or self.device.type != "cuda":
            return name
        return "torch.cuda." + name.rpartition(".")[2]

    return type_


def dispatch_device(stock: Any) -> Any:
    """FakeTensor.__torch_dispatch__: the device that C++ code sees outside of the mode too."""

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and (seen := seen_by_cpp(args[0])) is not None:
            return seen
        return stock.__func__(cls, func, types, args, kwargs or {})

    return classmethod(dispatch)

"""Makes this process a rank of TransformerEngine's modules on CPU tensors: the package's own Python (the development
dependency `transformer-engine`) over the emulated extension, and megatron-core built on both.

Call `init_te` before the first import of megatron; the process cannot be one of local modules afterwards.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import types
import warnings
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.utils._device

from megatron_bridge.device import device as device_module
from megatron_bridge.device import shims
from megatron_bridge.device.device import DeviceEnv
from tests.support.te import attention, context_parallel, deep_ep, extension, permutation

HOPPER, BLACKWELL = (9, 0), (10, 0)
_CPU = torch.device("cpu")
_RING = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"
# what the package imports of the extension's requirements and calls in none of its modules that megatron uses
_UNUSED = ("onnxscript", "onnx")


def _asks(depth: int = 2) -> bool:
    """Whether the caller's caller is megatron or TransformerEngine, which then gets CPU ranks' answers."""
    name = str(sys._getframe(depth).f_globals.get("__name__", ""))
    return name.startswith(("megatron.", "transformer_engine."))


def _replace(owner: Any, name: str, value: Any) -> None:
    """Callers in TransformerEngine get `value(...)`, all others the stock function."""
    stock = getattr(owner, name)

    def redirected(*args: Any, **kwargs: Any) -> Any:
        return value(*args, **kwargs) if _asks() else stock(*args, **kwargs)

    setattr(owner, name, redirected)


def _pretend_cuda(capability: tuple[int, int]) -> None:
    """What TransformerEngine asks of a device before it computes."""
    properties = types.SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132)
    _replace(torch.cuda, "is_available", lambda: True)
    _replace(torch.cuda, "get_device_properties", lambda *a: properties)
    _replace(torch.cuda, "get_device_capability", lambda *a: capability)
    _replace(torch.cuda, "is_current_stream_capturing", lambda: False)
    _replace(torch.cuda, "current_stream", context_parallel.Stream)
    _replace(torch.cuda, "stream", context_parallel.on_stream)
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = context_parallel.Stream, context_parallel.Event
    torch.version.cuda = "13.0"  # recipes ask for the least that they need
    stock: Any = torch.Tensor.is_cuda

    def is_cuda(self: torch.Tensor) -> bool:
        name = str(sys._getframe(1).f_globals.get("__name__", ""))
        return True if name.startswith("transformer_engine.") else stock.__get__(self)

    torch.Tensor.is_cuda = property(is_cuda)  # type: ignore[assignment]
    moved = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _asks():
            args = tuple(_CPU if _is_cuda(x) else x for x in args)
            kwargs |= {"device": _CPU} if _is_cuda(kwargs.get("device")) else {}
        return moved(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[assignment, method-assign]


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def import_te() -> extension.Extension:
    """`import transformer_engine` with the emulated extension, which is returned."""
    made = extension.make()
    attention.use_codes(made)
    sys.modules[extension.NAME] = made
    for name in [n for n in _UNUSED if importlib.util.find_spec(n.partition(".")[0]) is None]:
        sys.modules[name] = stand_in = MagicMock(name=name)
        stand_in.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    # the package then loads no shared libraries, and compiles none of its functions, which takes minutes on a CPU
    variables = {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0"}
    os.environ |= variables
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # its __init__ goes on when it finds no shared library
            common: Any = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda framework: None
        importlib.import_module("transformer_engine.pytorch")
        kernels = importlib.import_module("transformer_engine.pytorch.triton.permutation")
        for name, function in permutation.FUNCTIONS.items():
            assert hasattr(kernels, name), name
            setattr(kernels, name, made.counted(name, function))
        ring: Any = importlib.import_module(_RING)
        ring.flash_attn_p2p_communicate = context_parallel.waited_once(ring.flash_attn_p2p_communicate)
    finally:
        for name in variables:
            del os.environ[name]
    return made


def init_te(capability: tuple[int, int] = HOPPER) -> DeviceEnv:
    """As `init_device` on a CUDA rank with TransformerEngine, but on CPU tensors over gloo."""
    if (env := getattr(device_module.init_device, "te", None)) is not None:
        return env  # type: ignore[no-any-return]
    assert "megatron.core" not in sys.modules, "megatron was imported without TransformerEngine: use another process"
    env = DeviceEnv(_CPU, "gloo", transformer_engine=True, capability=capability)
    torch.utils._device._device_constructors()
    modules: tuple[Any, ...] = (shims, device_module)
    for module in modules:
        module.called_by_megatron = _asks
    for shim in shims.TORCH_SHIMS:
        shim.install()
    _pretend_cuda(capability)
    deep_ep.install()
    with device_module._eager_fuser():
        made = import_te()
        importlib.import_module("megatron.core")
    for shim in shims.MEGATRON_SHIMS:
        shim.install()
    buffer: Any = deep_ep.Buffer
    buffer.dispatch = made.counted("dispatch", buffer.dispatch)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(device_module._QuietRngTracker())

    def init_device() -> DeviceEnv:
        return env

    init_device.te = env  # type: ignore[attr-defined]
    device_module.init_device = init_device  # type: ignore[assignment]
    _resolve_as_cuda()
    return env


def _resolve_as_cuda() -> None:
    """The trainer's settings are those of a CUDA rank."""
    trainer: Any = importlib.import_module("megatron_bridge.trainer")
    stock = trainer.resolve

    def resolve(config: Any, hf: Any, *, cuda: bool, te: bool, capability: Any) -> Any:
        return stock(config, hf, cuda=True, te=te, capability=capability)

    trainer.resolve = resolve

"""The device, and megatron-core made importable on it: the only module that knows whether there is CUDA.

On CUDA with TransformerEngine nothing is replaced; otherwise the tables of `shims.py` are installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._device

from megatron_bridge.shims import MEGATRON_SHIMS, NO_TE_SHIMS, TORCH_SHIMS, asked_by_megatron

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class DeviceEnv:
    """What the rest of the trainer may know about the machine."""

    device: torch.device
    backend: str  # "gloo" or "nccl"
    transformer_engine: bool = False  # installed beside a CUDA device
    capability: tuple[int, int] | None = None  # CUDA's compute capability


def _quiet_imports() -> None:
    """Megatron warns a dozen times, on import, that TransformerEngine and Apex are absent: that is known here."""
    for message in ("Transformer Engine and Apex are not", "Apex is not installed", "full scope is deprecated"):
        warnings.filterwarnings("ignore", message=message)


class _QuietRngTracker(logging.Filter):
    """The tracker warns whenever the CPU generator moves inside a fork; on CPU it is the generator being forked."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()


@contextlib.contextmanager
def _eager_fuser() -> Iterator[None]:
    """Megatron binds `jit_fuser = torch.compile` once, on import; the first step would spend 18 s in g++ on CPU."""
    stock = torch.compile

    def compile_(model: Any = None, **kwargs: Any) -> Any:
        if not asked_by_megatron():
            return stock(model, **kwargs)
        return model if model is not None else (lambda f: f)

    torch.compile = compile_  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = stock  # type: ignore[assignment]


def _mock_missing_te_gemm() -> None:
    """The router's autograd function reads `te_general_gemm`, a name its module only binds when TE imports (0.16.1)."""
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    assert not hasattr(moe_utils, "te_general_gemm"), "moe_utils.te_general_gemm is bound without TE: drop this shim"
    moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def _keep_freed_memory() -> None:
    """glibc gives freed memory back to the system and asks for it anew with every large tensor: a tenth of a small
    model's step is page faults. Up to a gigabyte is kept instead; other C libraries stay as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_threshold, trim_threshold, top_pad = -3, -1, -2
        for parameter, size in ((mmap_threshold, 32 << 20), (trim_threshold, 1 << 30), (top_pad, 64 << 20)):
            mallopt(parameter, size)


@functools.cache
def init_device() -> DeviceEnv:
    """Choose the device and make megatron-core importable on it. Call it before the first `import megatron`; later
    calls return the same value.

    Raises AssertionError when megatron was imported first, or when a shim's target moved.
    """
    cuda = torch.cuda.is_available()
    te = cuda and importlib.util.find_spec("transformer_engine") is not None
    env = DeviceEnv(_CPU, "gloo")
    if cuda:
        device = torch.device("cuda", torch.cuda.current_device())
        env = DeviceEnv(device, "nccl", te, torch.cuda.get_device_capability(device))
    if te:
        return env
    assert "megatron.core" not in sys.modules, "init_device() must run before the first import of megatron.core"
    _quiet_imports()
    if cuda:
        importlib.import_module("megatron.core")
    else:
        _keep_freed_memory()
        # torch remembers at first use which functions `with torch.device(...)` acts on: it must see the stock ones,
        # which the shims call, or models built under such a context (transformers' loading) come out unfilled
        torch.utils._device._device_constructors()
        for shim in TORCH_SHIMS:
            shim.install()
        with _eager_fuser():
            importlib.import_module("megatron.core")
        for shim in MEGATRON_SHIMS:
            shim.install()
        logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_QuietRngTracker())
    for shim in NO_TE_SHIMS:
        shim.install()
    _mock_missing_te_gemm()
    return env


def set_environment(allowed: Mapping[str, tuple[str, ...]]) -> None:
    """Of this process, before its first product on a device and its first collective: each variable that is not set
    gets the first of its values. Raises ValueError for one that somebody has set to something else."""
    for name, values in allowed.items():
        if os.environ.setdefault(name, values[0]) not in values:
            raise ValueError(
                f"alignment.deterministic = true, but the environment has {name} = {os.environ[name]!r}: unset it, or "
                f"set it to {' or '.join(values)}"
            )

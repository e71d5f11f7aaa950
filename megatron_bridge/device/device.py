"""Chooses the device and makes megatron-core importable on it. Modules that build the model get
the result as a `DeviceEnv`.

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

from megatron_bridge.device.shims import MEGATRON_SHIMS, NO_TE_SHIMS, TORCH_SHIMS, called_by_megatron

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class DeviceEnv:
    """The properties of the machine that the rest of the trainer depends on."""

    device: torch.device
    backend: str  # "gloo" or "nccl"
    transformer_engine: bool = False  # installed beside a CUDA device
    capability: tuple[int, int] | None = None  # CUDA's compute capability


def _quiet_libraries() -> None:
    """Silence megatron's import warnings about TransformerEngine and Apex, which are absent on purpose, and what torch
    and megatron announce about their next versions: the log of a rank ends with its error."""
    for message in ("Transformer Engine and Apex are not", "Apex is not installed", "full scope is deprecated"):
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|megatron)\.")


class _QuietRngTracker(logging.Filter):
    """Drops the tracker's warning about CPU generator use inside a fork: on CPU that generator is the forked one."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()


@contextlib.contextmanager
def _eager_fuser() -> Iterator[None]:
    """Disable torch.compile while megatron is imported. It binds `jit_fuser = torch.compile` then, and the first step
    would spend 18 s in g++ on CPU."""
    stock = torch.compile

    def compile_(model: Any = None, **kwargs: Any) -> Any:
        if not called_by_megatron():
            return stock(model, **kwargs)
        return model if model is not None else (lambda f: f)

    torch.compile = compile_
    try:
        yield
    finally:
        torch.compile = stock


def _mock_missing_te_gemm() -> None:
    """Define `te_general_gemm`, which the router's autograd function reads but its module binds only if
    TransformerEngine imports (0.16.1)."""
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    assert not hasattr(moe_utils, "te_general_gemm"), "moe_utils.te_general_gemm is bound without TE: drop this shim"
    moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def transformer_engine_found() -> bool:
    """Whether TransformerEngine's extension for torch is installed. Its Python is another distribution,
    `transformer-engine`, and cannot be imported alone."""
    return importlib.util.find_spec("transformer_engine_torch") is not None


def hide_transformer_engine() -> None:
    """Let `import transformer_engine` fail in this process, where it is installed. Megatron takes its optimizer and its
    specs from the package without a look at the device, and both need CUDA."""
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]


def keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory. By default it returns the memory of every large tensor to the system,
    and page faults take a tenth of a small model's step. Other C libraries are not configured."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_threshold, trim_threshold, top_pad = -3, -1, -2
        for parameter, size in ((mmap_threshold, 32 << 20), (trim_threshold, 1 << 30), (top_pad, 64 << 20)):
            mallopt(parameter, size)


@functools.cache
def init_device() -> DeviceEnv:
    """Choose the device and make megatron-core importable on it. Call it before the first `import megatron`; later
    calls return the same value.

    Raises AssertionError when megatron was imported before, or when the target of a shim has changed.
    """
    cuda = torch.cuda.is_available()
    te = cuda and transformer_engine_found()
    env = DeviceEnv(_CPU, "gloo")
    if cuda:
        device = torch.device("cuda", torch.cuda.current_device())
        env = DeviceEnv(device, "nccl", te, torch.cuda.get_device_capability(device))
    if te:
        return env
    assert "megatron.core" not in sys.modules, "init_device() must run before the first import of megatron.core"
    _quiet_libraries()
    hide_transformer_engine()
    if cuda:
        importlib.import_module("megatron.core")
    else:
        keep_freed_memory()
        # torch caches at first use which functions `with torch.device(...)` affects: it must see the stock functions,
        # which the shims call, or models built under such a context (transformers' loading) are not initialized
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
    """Set each unset environment variable to the first of its allowed values. Call it before the first matrix product
    on a device and the first collective. Raises ValueError for a variable that is set to another value."""
    for name, values in allowed.items():
        if os.environ.setdefault(name, values[0]) not in values:
            raise ValueError(
                f"alignment.deterministic = true, but the environment has {name} = {os.environ[name]!r}: unset it, or "
                f"set it to {' or '.join(values)}"
            )

"""Prepares a process for a fake CUDA rank on a build of torch for CPUs: megatron-core is imported as on a CUDA rank,
and calls of torch.cuda that need a driver are replaced.

`Tensor.is_cuda`, device arguments, pinned memory and copies between host and device are those of fake tensors
(tensors.py); only calls that this build refuses are replaced.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

import torch

from megatron_bridge.device import device as device_module
from megatron_bridge.device.cpu_ops import foreach_norm, scale_in_place, swiglu_back, weighted_swiglu_back
from megatron_bridge.device.device import DeviceEnv
from megatron_bridge.device.shims import IDLE_STREAM, NO_TE_SHIMS, IdleEvent, IdleStream, called_by_megatron
from megatron_bridge.fake.substitutes.substitute import Substitute
from megatron_bridge.fake.substitutes.tensors import dispatch_device, is_cuda, to_cuda, to_device, type_name

CUDA = torch.device("cuda", 0)
_FAKE_TENSOR = "torch._subclasses.fake_tensor:FakeTensor"


def _current_device(stock: Any) -> Any:
    """megatron uses it as `device=` argument, where torch takes a number for a device that this build lacks."""
    return lambda: CUDA if called_by_megatron() else 0


def _as(value: Any) -> Any:
    return lambda stock: lambda *args, **kwargs: value


def _unpinned(stock: Any) -> Any:
    """`torch.tensor` without pinned memory, for which this build has no allocator."""
    return lambda *args, pin_memory=False, **kwargs: stock(*args, **kwargs)


def cuda_substitutes() -> tuple[Substitute, ...]:
    """Replacements of CUDA's calls while a rank is executed."""
    driver, stream = "needs a driver", "streams"
    return (
        Substitute("torch.cuda", "current_device", driver, _current_device),
        Substitute("torch.cuda", "synchronize", driver, _as(None)),
        Substitute("torch.cuda", "empty_cache", driver, _as(None)),
        Substitute("torch.cuda", "set_device", driver, _as(None)),
        Substitute("torch.cuda", "is_current_stream_capturing", driver, _as(False)),
        Substitute("torch.cuda", "Stream", stream, lambda stock: IdleStream),
        Substitute("torch.cuda", "Event", stream, lambda stock: IdleEvent),
        Substitute("torch.cuda", "stream", stream, lambda stock: lambda *a, **k: contextlib.nullcontext()),
        Substitute("torch.cuda", "current_stream", stream, _as(IDLE_STREAM)),
        Substitute("torch.cuda", "default_stream", stream, _as(IDLE_STREAM)),
        Substitute("torch.cuda.nccl", "version", driver, _as((2, 27, 0))),
        Substitute("torch.cuda", "get_device_capability", driver, _as((9, 0))),
        Substitute("torch.cuda.nvtx", "range_push", driver, _as(None)),
        Substitute("torch.cuda.nvtx", "range_pop", driver, _as(None)),
        Substitute("torch", "tensor", "pinned memory", _unpinned),
        Substitute("torch:Tensor", "cuda", "device of fake tensors", to_cuda),
        Substitute("torch:Tensor", "to", "device of fake tensors", to_device),
        Substitute("torch:Tensor", "type", "device of fake tensors", type_name),
        Substitute("torch:Tensor", "record_stream", stream, _as(None)),
        Substitute(_FAKE_TENSOR, "is_cuda", "device of fake tensors", lambda stock: property(is_cuda)),
        Substitute(_FAKE_TENSOR, "__torch_dispatch__", "device of fake tensors", dispatch_device),
        Substitute("megatron_bridge.device.cuda_settings", "use_deterministic_kernels", driver, _as(None)),
        Substitute("megatron.core.optimizer.clip_grads", "l2_norm_impl", "multi-tensor kernel", foreach_norm),
        Substitute(
            "megatron.core.optimizer.clip_grads", "multi_tensor_scale_impl", "multi-tensor kernel", scale_in_place
        ),
        # with torch.compile each is one kernel without temporaries of a whole tensor
        Substitute("megatron.core.fusions.fused_bias_swiglu", "swiglu_back", "torch.compile", swiglu_back),
        Substitute(
            "megatron.core.fusions.fused_bias_swiglu", "weighted_swiglu_back", "torch.compile", weighted_swiglu_back
        ),
    )


def init_fake_cuda() -> DeviceEnv:
    """As `init_device` on a CUDA rank without TransformerEngine, whose modules are replaced by megatron's local ones.
    Call it before the first import of megatron, in a process for fake CUDA ranks only.

    Raises ValueError when megatron was imported before, because it is then set up for CPU ranks.
    """
    env = DeviceEnv(CUDA, "nccl")
    if getattr(device_module.init_device, "fake", None) == env:
        return env
    if "megatron.core" in sys.modules:
        raise ValueError(
            "this process has already imported megatron-core for CPU ranks: execute a fake CUDA rank in a new process"
        )
    device_module._quiet_libraries()
    device_module.hide_transformer_engine()
    with device_module._eager_fuser():
        importlib.import_module("megatron.core")
    for shim in NO_TE_SHIMS:
        shim.install()
    device_module._mock_missing_te_gemm()

    def init_device() -> DeviceEnv:
        return env

    init_device.fake = env  # type: ignore[attr-defined]
    device_module.init_device = init_device  # type: ignore[assignment]
    return env

"""Whether a Triton kernel or plain PyTorch computes. torch's wheel for CUDA brings Triton; nothing here imports it.

A build of torch for ROCm calls its devices CUDA, with capabilities of another numbering (9.4 is an MI300): no kernel is
compiled for them, so plain PyTorch computes there.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

VARIABLE = "MILES_LIKE_TRITON"
LEAST_CAPABILITY = (9, 0)  # Hopper: the suite compiles the kernels for it and for Blackwell


def uses_triton(tensor: Tensor) -> bool:
    """Whether Triton kernels compute on `tensor`: it lies on a CUDA device of capability 9.0 or later, Triton is
    installed, and the environment variable MILES_LIKE_TRITON is not 0. A fake tensor has no memory for a kernel."""
    if not tensor.is_cuda or isinstance(tensor, FakeTensor) or os.environ.get(VARIABLE) == "0":
        return False
    return _installed() and _is_new(tensor.device)


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _is_new(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY

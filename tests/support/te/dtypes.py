"""Dtypes as TransformerEngine's extension numbers them (transformer_engine/pytorch/constants.py of 2.20.2)."""

from __future__ import annotations

from typing import Any

import torch

_BY_NUMBER = {
    0: torch.uint8,
    1: torch.int32,
    2: torch.float32,
    3: torch.float16,
    4: torch.bfloat16,
    5: torch.float8_e4m3fn,
    6: torch.float8_e5m2,
}


def torch_dtype(dtype: Any) -> torch.dtype:
    """Of a member of either `DType`, or a torch dtype itself."""
    return dtype if isinstance(dtype, torch.dtype) else _BY_NUMBER[int(dtype)]

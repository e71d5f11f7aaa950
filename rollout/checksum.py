"""The hash by which publisher and embedded engine agree that the same bytes are loaded.

A stock SGLang server hashes its fused, sharded, dequantised tensors instead, so its hashes compare only with those of
another server of the same layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def tensor_checksum(name: str, tensor: Tensor) -> str:
    """sha256 hex over name, dtype, shape and little-endian bytes of one stored tensor (codes, not decoded values)."""
    t = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{name}\n{t.dtype}\n{tuple(t.shape)}\n".encode())
    digest.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def engine_checksum(checksums: Mapping[str, str]) -> str:
    """sha256 hex over all `tensor_checksum`s, sorted by name."""
    return hashlib.sha256("".join(f"{n} {checksums[n]}\n" for n in sorted(checksums)).encode()).hexdigest()

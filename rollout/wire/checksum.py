"""Hashes of stored tensors, with which a publisher checks what the embedded engine has loaded.

A stock SGLang server hashes its fused, sharded, dequantized tensors instead. Its hashes can only be compared with those
of another server of the same layout.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping

from torch import Tensor


def tensor_checksum(name: str, tensor: Tensor) -> str:
    """SHA-256 hex of name, dtype, shape and little-endian bytes of one stored tensor (codes, not decoded values)."""
    t = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{name}\n{t.dtype}\n{tuple(t.shape)}\n".encode())
    # not through an array: memory that one refers to, a parameter's, could never be resized again
    digest.update((ctypes.c_char * t.nbytes).from_address(t.data_ptr()) if t.nbytes else b"")
    return digest.hexdigest()


def engine_checksum(checksums: Mapping[str, str]) -> str:
    """SHA-256 hex of all `tensor_checksum`s in the order of their names."""
    return hashlib.sha256("".join(f"{n} {checksums[n]}\n" for n in sorted(checksums)).encode()).hexdigest()

"""The encoded weights that were published last, which differences are taken against."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.wire.deltas import Encoded, content_hash, encode_delta


class EncodedWeights:
    """The stored tensors of one version, copied to the host: once, whatever happens to the sources."""

    def __init__(self) -> None:
        self.version: int | None = None  # None: incomplete
        self._held: dict[str, tuple[Tensor, bytes]] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor, _ in self._held.values())

    def clear(self) -> None:
        self.version = None
        self._held.clear()

    def hold(self, name: str, tensor: Tensor) -> None:
        """Store a copy of a tensor that is not stored yet."""
        own = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format).copy_(tensor.detach())
        self._held[name] = own, content_hash(own)

    def advance(self, name: str, tensor: Tensor) -> Encoded:
        """The difference from the stored tensor to `tensor`, which replaces it."""
        new = tensor.detach().cpu().contiguous()
        old, old_hash = self._held.get(name, (None, b""))
        new_hash = content_hash(new)
        encoded = encode_delta(old, old_hash, new, new_hash)
        if old is None or old.shape != new.shape or old.dtype is not new.dtype:
            self.hold(name, new)
        else:
            self._held[name] = old.copy_(new), new_hash
        return encoded

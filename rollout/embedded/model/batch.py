"""The input of one forward pass.

Letters: T packed tokens, B sequences of a chunk, Q query rows per sequence, L keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Sequences that attend in one call."""

    rows: slice  # of the packed tokens
    key_slots: Tensor  # [B, L] int64: cache slot of each position; any slot past the end of a sequence
    q_start: Tensor  # [B] int64: position of the first query row
    pad: Tensor | None  # [B, Q] int64 into the chunk's rows; None: Q = 1
    unpad: Tensor | None  # [rows] int64 into [B * Q]

    @property
    def queries(self) -> int:
        """Q, the number of query rows per sequence."""
        return 1 if self.pad is None else int(self.pad.shape[1])

    def padded(self, q: Tensor) -> Tensor:
        """[rows, ...] -> [B, Q, ...]."""
        return q[:, None] if self.pad is None else q[self.pad]

    def unpadded(self, out: Tensor) -> Tensor:
        """[B, Q, ...] -> [rows, ...]."""
        flat = out.flatten(0, 1)
        return flat if self.unpad is None else flat[self.unpad]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBatch:
    """Any mix of prompt chunks and decoded tokens."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: the cache slot that each token is written to
    chunks: Sequence[Chunk]  # tile [0, T)

"""The input of one forward pass.

Letters: T packed tokens, B sequences of a chunk, Q query rows per sequence, L keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rollout.embedded.device.transfers import Transfers


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
    on_host: Tensor | None = None  # `slots` in host memory; None: they are there

    @property
    def host_slots(self) -> Tensor:
        """`slots`, in host memory."""
        return self.slots if self.on_host is None else self.on_host

    def sent(self, transfers: Transfers, *more: Tensor) -> tuple[ForwardBatch, tuple[Tensor, ...]]:
        """The batch and the tensors `more` on the device of `transfers`, all in one copy."""
        if transfers.on_host:
            return self, more
        chunks = [(c.key_slots, c.q_start, c.pad, c.unpad) for c in self.chunks]
        own = [self.tokens, self.positions, self.slots, *(t for c in chunks for t in c if t is not None)]
        sent = iter(transfers.send(*own, *more))
        tokens, positions, slots = (next(sent) for _ in range(3))
        moved = [
            Chunk(
                rows=c.rows,
                key_slots=next(sent),
                q_start=next(sent),
                pad=None if c.pad is None else next(sent),
                unpad=None if c.unpad is None else next(sent),
            )
            for c in self.chunks
        ]
        batch = ForwardBatch(tokens=tokens, positions=positions, slots=slots, chunks=moved, on_host=self.slots)
        return batch, tuple(sent)

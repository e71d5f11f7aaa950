"""What the trainer says of a batch's tokens -> a stream for each sample: the way back from `packing`.

Letters: S tokens a sample, T packed tokens, C values a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_like.packing import names_of
from miles_like.types import SampleGroup, TrainBatch

Grid = Sequence[Sequence[Tensor]]  # [dp][micro] of [T] or [T, C], of labels


def unpack(batch: TrainBatch, values: Grid) -> dict[str, Tensor]:
    """Name -> [S] (or [S, C]): what stood at position t of a micro-batch is told of token t+1; 0 where that is not
    under loss, and at the first token. Samples that were left out of the batch are not there."""
    out: dict[str, Tensor] = {}
    for row, of_row in zip(batch.grid, values, strict=True):
        for micro, of_labels in zip(row, of_row, strict=True):
            assert len(of_labels) == len(micro.tokens), (len(of_labels), len(micro.tokens))
            under_loss = micro.loss_mask.view(-1, *(1 for _ in of_labels.shape[1:]))
            kept = torch.where(under_loss, of_labels.to(micro.loss_mask.device), 0)
            # one row of zeros before the whole pack: every sample's first token is told of by the row before it
            shifted = torch.cat([kept.new_zeros(1, *kept.shape[1:]), kept])
            ends = micro.cu_seqlens.tolist()
            for name, a, b in zip(micro.samples, ends, ends[1:], strict=False):
                if name:
                    out[name] = stream = shifted[a : b + 1].clone()
                    stream[0] = 0
    return out


def streams_of(groups: Sequence[SampleGroup], batch: TrainBatch, values: Grid) -> list[list[Tensor]]:
    """`unpack`ed, for each group [G] of [S] (or [S, C]), in the order of its samples; `batch` is `pack`ed of these very
    groups. Zeros for a sample without a token under loss, which no batch holds."""
    found = unpack(batch, values)
    width, dtype = values[0][0].shape[1:], values[0][0].dtype
    names = iter(names_of([s for g in groups for s in g.samples]))
    out = [
        [
            found.pop(name) if (name := next(names)) in found else torch.zeros(len(s.token_ids), *width, dtype=dtype)
            for s in g.samples
        ]
        for g in groups
    ]
    assert not found, f"samples of other groups: {sorted(found)[:3]}"
    return out

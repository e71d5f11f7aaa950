"""Fills planned micro-batches with the values of their samples. Tokens are shifted here and nowhere else.

Letters: S tokens a sample, N samples a micro-batch, T packed tokens, F tokens of all samples end to end, C candidates a
token.

The model's inputs are the first S-1 tokens of a sample; position t of a micro-batch holds input token t and everything
about its label, token t+1. An empty cell of a plan holds one masked token, copied from a real sample, so that its rank
has a valid input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from miles_like.batch.bins import Floats, Ints, ranges
from miles_like.records import PlannedMicroBatch
from miles_like.types import MicroBatch


class Columns(Protocol):
    """The values of a sample's S tokens that a micro-batch holds, without advantages and routes. A `Sample` has
    them."""

    @property
    def token_ids(self) -> Tensor: ...  # [S] int64
    @property
    def loss_mask(self) -> Tensor: ...  # [S] bool
    @property
    def logprobs(self) -> Tensor: ...  # [S] fp32
    @property
    def streams(self) -> Mapping[str, Tensor]: ...  # name -> [S] or [S, C] fp32
    @property
    def candidates(self) -> Tensor | None: ...  # [S, C] int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatColumns:
    """Samples end to end, not yet shifted."""

    names: Sequence[str]  # [samples], unique
    lengths: Ints  # [samples], S of each
    starts: Ints  # [samples], where each begins among the F tokens
    tokens: Tensor  # [F] int64
    loss_mask: Tensor  # [F] bool
    logprobs: Tensor  # [F] fp32
    advantages: Tensor  # [F] fp32
    weights: Tensor | None  # [F] fp32
    streams: Mapping[str, Tensor]  # [F] or [F, C] fp32
    candidates: Tensor | None  # [F, C] int64

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        samples: Sequence[Columns],
        advantages: Sequence[float | Tensor],
    ) -> FlatColumns:
        """advantages: of each sample, a number or [S] fp32. Raises ValueError where samples differ in their streams."""
        lengths = np.array([s.token_ids.shape[0] for s in samples], dtype=np.int64)
        return cls(
            names=names,
            lengths=lengths,
            starts=np.cumsum(lengths) - lengths,
            tokens=torch.cat([s.token_ids for s in samples]),
            loss_mask=torch.cat([s.loss_mask for s in samples]),
            logprobs=torch.cat([s.logprobs for s in samples]).float(),
            advantages=_along_tokens(lengths, advantages),
            weights=None,
            streams={name: torch.cat([s.streams[name] for s in samples]) for name in _streams(names, samples)},
            candidates=None
            if samples[0].candidates is None
            else torch.cat([s.candidates for s in samples if s.candidates is not None]),
        )

    def weighted(self, weights: Floats | None) -> FlatColumns:
        """weights [samples]: the factor of the losses of each sample's tokens; None: 1 each."""
        if weights is None:
            return replace(self, weights=None)
        return replace(self, weights=torch.from_numpy(np.repeat(weights, self.lengths)).float())

    def micro_batch(self, cell: Ints) -> MicroBatch:
        """The samples of numbers `cell` [N], shifted, without routes."""
        n = self.lengths[cell] - 1
        at = torch.from_numpy(ranges(self.starts[cell], n))  # [T] index of each input in the flat streams
        return MicroBatch(
            samples=tuple(self.names[i] for i in cell),
            tokens=self.tokens[at],
            labels=self.tokens[at + 1],
            positions=torch.from_numpy(ranges(np.zeros_like(n), n)),
            cu_seqlens=torch.from_numpy(np.concatenate(([0], np.cumsum(n)))).to(torch.int32),
            loss_mask=self.loss_mask[at + 1],
            advantages=self.advantages[at + 1],
            rollout_logprobs=self.logprobs[at + 1],
            routing=None,
            weights=None if self.weights is None else self.weights[at + 1],
            streams={name: stream[at + 1] for name, stream in self.streams.items()},
            candidates=None if self.candidates is None else self.candidates[at + 1],
        )

    def filler(self, i: int) -> MicroBatch:
        """The first input token of sample i, without loss and routes."""
        token = self.tokens[int(self.starts[i])].reshape(1)
        return MicroBatch(
            samples=("",),
            tokens=token,
            labels=token.clone(),
            positions=torch.zeros(1, dtype=torch.int64),
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
            loss_mask=torch.zeros(1, dtype=torch.bool),
            advantages=torch.zeros(1),
            rollout_logprobs=torch.zeros(1),
            routing=None,
            weights=None if self.weights is None else torch.zeros(1),
            streams={name: torch.zeros_like(stream[:1]) for name, stream in self.streams.items()},
            candidates=None if self.candidates is None else torch.zeros_like(self.candidates[:1]),
        )


def fill(
    cells: Sequence[PlannedMicroBatch],
    columns: Mapping[str, Columns],
    advantages: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[MicroBatch]:
    """The micro-batches of `cells`, without routes, bit for bit as `packing.pack` makes them. columns: of the samples,
    under their names; advantages: [S] fp32 of those for which a cell has None. Raises ValueError where samples differ
    in their streams."""
    whole = [cell for cell in cells if not cell.filler]
    names = [name for cell in whole for name in cell.samples]
    flat = None
    if whole:
        values = [a for cell in whole for a in cell.advantages]
        own = [advantages[n] if a is None else a for n, a in zip(names, values, strict=True)]
        flat = FlatColumns.of(names, [columns[n] for n in names], own)
        factors = [w for cell in whole if cell.weights is not None for w in cell.weights]
        flat = flat.weighted(np.array(factors) if factors else None)
    out, done = list[MicroBatch](), 0
    for cell in cells:
        if cell.filler or flat is None:
            (name,) = cell.samples
            weights = None if cell.weights is None else np.array(cell.weights)
            out.append(FlatColumns.of([name], [columns[name]], [0.0]).weighted(weights).filler(0))
        else:
            out.append(flat.micro_batch(np.arange(done, done + len(cell.samples))))
            done += len(cell.samples)
    return out


def _along_tokens(lengths: Ints, values: Sequence[float | Tensor]) -> Tensor:
    """[F] fp32 from a number or an [S] tensor for each sample."""
    if not any(isinstance(v, Tensor) for v in values):
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths))
    return torch.cat(
        [
            v.float() if isinstance(v, Tensor) else torch.full((n,), v)
            for n, v in zip(lengths.tolist(), values, strict=True)
        ]
    )


def _streams(sample_names: Sequence[str], samples: Sequence[Columns]) -> list[str]:
    """Names of the streams."""
    names = set(samples[0].streams)
    for name, s in zip(sample_names, samples, strict=True):
        if set(s.streams) != names or (s.candidates is None) != (samples[0].candidates is None):
            raise ValueError(
                f"sample {name} has the streams {sorted(s.streams)}, but sample {sample_names[0]} has "
                f"{sorted(names)}: all samples of a step need the same streams"
            )
    return sorted(names)

"""Linear layers whose weights are kept decoded or as codes.

Codes are decoded at each use, into one shared buffer, to the values that a decoded copy would hold: the same numbers
are multiplied either way. A use decodes each weight once, for any number of rows. Small weights are always kept
decoded, except experts, which a layer has many of.

Letters: T rows, N rows (out) and K columns (in) of a weight, B weights of one shape, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.formats.codec import Codec
from quant.qat import fake_activations
from rollout.embedded.model import plain_ops
from rollout.embedded.model.operations import Operations

_TOGETHER = 1 << 18  # elements of experts that are decoded and multiplied at once: they stay in a core's cache
SMALL = 1 << 16  # fused weights up to this number of elements are kept decoded: decoding calls would dominate


class Scratch:
    """One buffer for decoded values. Each `take` overwrites the result of the last one."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.dtype, self.device = dtype, torch.device(device)
        self._flat = torch.empty(0, dtype=dtype, device=device)

    def take(self, *shape: int) -> Tensor:
        n = math.prod(shape)
        if len(self._flat) < n:
            with torch.inference_mode(False):  # an inference tensor could not be written outside of inference mode
                self._flat = torch.empty(n, dtype=self.dtype, device=self.device)
        return self._flat[:n].view(shape)

    def free_memory(self) -> None:
        self._flat = torch.empty(0, dtype=self.dtype, device=self.device)

    @property
    def tensor(self) -> Tensor:
        """The whole buffer, one-dimensional."""
        return self._flat


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Quantized weights of one shape, stacked."""

    codec: Codec
    stored: Mapping[str, Tensor]  # last component of the stored name -> [B, ...]
    shape: tuple[int, int]  # N, K
    count: int  # B

    def fill(self, out: Tensor) -> None:
        """Decodes into out, of B N K elements."""
        self.codec.decode_stored(self.stored, out.view(self.count, *self.shape))

    def select(self, chosen: Sequence[int]) -> Codes:
        """The weights `chosen`, ascending; a view if they are consecutive."""
        first, n = chosen[0], len(chosen)
        if chosen[-1] - first == n - 1:
            stored = {leaf: t[first : first + n] for leaf, t in self.stored.items()}
        else:
            at = torch.tensor(chosen)
            stored = {leaf: t.index_select(0, at) for leaf, t in self.stored.items()}
        return Codes(self.codec, stored, self.shape, n)


class Linear:
    """Fused projections of one input: a weight [N, K] in pieces, stacked along N.

    inputs: codec that rounds the input of quantized pieces; None: no rounding.
    """

    def __init__(
        self, pieces: Sequence[Tensor | Codes], *, keep_codes: bool, scratch: Scratch, inputs: Codec | None = None
    ) -> None:
        coded = [isinstance(p, Codes) for p in pieces]
        self._lengths = [len(p) if isinstance(p, Tensor) else p.count * p.shape[0] for p in pieces]
        first = pieces[0]
        self.shape = (sum(self._lengths), int(first.shape[1]))
        self._inputs = inputs if any(coded) else None
        self._coded = coded
        self._pieces, self._scratch = tuple(pieces), scratch
        self._dense: Tensor | None = None
        if not (keep_codes and any(coded)) or math.prod(self.shape) <= SMALL:
            self._dense = self._fill(torch.empty(self.shape, dtype=scratch.dtype, device=scratch.device))
            self._pieces = ()

    @property
    def rounds_inputs(self) -> bool:
        return self._inputs is not None

    def value(self) -> Tensor:
        """[N, K], valid until the next use of a weight that is kept as codes."""
        return self._dense if self._dense is not None else self._fill(self._scratch.take(*self.shape))

    def opened(self) -> Linear:
        """A copy that is decoded once, for several consecutive uses; valid as long as `value`."""
        out = copy(self)
        out._dense = self.value()
        return out

    def rows(self) -> tuple[Tensor, ...]:
        """The pieces of a weight that is kept decoded; else empty."""
        return () if self._dense is None else torch.split(self._dense, self._lengths)

    def held(self) -> Iterator[Tensor]:
        """The tensors in memory."""
        return _held([self._dense, *self._pieces])

    def __call__(self, x: Tensor, ops: Operations, shards: int = 1) -> Tensor:
        """x [T, K] -> [T, N]; the product over K is summed in `shards`."""
        w = self.value()
        if self._inputs is None:
            return ops.linear(x, w, shards)
        rounded = fake_activations(self._inputs, x)
        if all(self._coded):
            return ops.linear(rounded, w, shards)
        each = zip(torch.split(w, self._lengths), self._coded, strict=True)
        return torch.cat([ops.linear(rounded if coded else x, piece, shards) for piece, coded in each], -1)

    def _fill(self, out: Tensor) -> Tensor:
        for piece, rows in zip(self._pieces, torch.split(out, self._lengths), strict=True):
            if isinstance(piece, Codes):
                piece.fill(rows)
            else:
                rows.copy_(piece)
        return out


class Experts:
    """One projection, or several fused, of each expert: [E, N, K], decoded, or as codes with B / E weights each."""

    def __init__(
        self,
        weights: Tensor | Codes,
        experts: int,
        *,
        keep_codes: bool,
        scratch: Scratch,
        inputs: Codec | None = None,
    ) -> None:
        self._inputs = inputs if isinstance(weights, Codes) else None
        self._scratch = scratch
        self._codes = weights if isinstance(weights, Codes) and keep_codes else None
        self._dense: Tensor | None = None
        if isinstance(weights, Codes):
            self._fused = weights.count // experts
            self.shape = (experts, self._fused * weights.shape[0], weights.shape[1])
            if not keep_codes:
                self._dense = torch.empty(self.shape, dtype=scratch.dtype, device=scratch.device)
                weights.fill(self._dense)
        else:
            self._dense, self.shape = weights, (weights.shape[0], weights.shape[1], weights.shape[2])

    def dense(self) -> Tensor | None:
        """[E, N, K] if it is kept decoded, else None."""
        return self._dense

    def held(self) -> Iterator[Tensor]:
        """The tensors in memory."""
        return _held([self._dense, self._codes])

    def rounded(self, x: Tensor) -> Tensor:
        """Rounds inputs, which may be in any order, for `__call__`."""
        return x if self._inputs is None else fake_activations(self._inputs, x)

    def __call__(self, x: Tensor, counts: Sequence[int], ops: Operations, shards: int = 1) -> Tensor:
        """x [T, K] sorted by expert, counts [E] rows of each -> [T, N]; the product over K is summed in `shards`."""
        if not len(x):
            return x.new_zeros(0, self.shape[1])
        if self._dense is not None:
            return ops.grouped_linear(x, self._dense, counts, shards)
        out, start = [], 0
        for chosen in self._together([e for e, n in enumerate(counts) if n]):
            rows = [counts[e] for e in chosen]
            out.append(ops.grouped_linear(x[start : start + sum(rows)], self._decoded(chosen), rows, shards))
            start += sum(rows)
        return out[0] if len(out) == 1 else torch.cat(out)

    def by_ends(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [T, K] sorted by expert -> [T, N]. ends: int32 [E], on the device of x, the row after the last of each
        expert. All experts of a layer that is kept as codes are decoded: which ones are used is not known here."""
        w = self._dense
        if w is None:
            assert self._codes is not None
            w = self._scratch.take(*self.shape)
            self._codes.fill(w)
        return plain_ops.by_ends(x, w, ends)

    def _together(self, used: list[int]) -> Iterator[list[int]]:
        n = max(1, _TOGETHER // (self.shape[1] * self.shape[2]))
        return (used[i : i + n] for i in range(0, len(used), n))

    def _decoded(self, chosen: list[int]) -> Tensor:
        """[chosen, N, K]."""
        assert self._codes is not None
        out = self._scratch.take(len(chosen), *self.shape[1:])
        self._codes.select([e * self._fused + i for e in chosen for i in range(self._fused)]).fill(out)
        return out


def _held(things: Sequence[Tensor | Codes | None]) -> Iterator[Tensor]:
    for t in things:
        if isinstance(t, Codes):
            yield from t.stored.values()
        elif t is not None:
            yield t

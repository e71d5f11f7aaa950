"""Weights of linear layers as they lie in memory, decoded or as codes, and the product with them.

Codes are decoded at each use, into one buffer that all share, to the values that a decoded copy would hold: either way
the same numbers are multiplied. A use costs the decoding of each weight once, whatever the number of rows. Beside
experts, which a layer has many of, small weights are kept decoded in any case.

Letters: T rows, N rows (out) and K columns (in) of a weight, B weights of one shape, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.codec import Codec
from quant.qat import fake_activations
from rollout.embedded.operations import Operations

_TOGETHER = 1 << 18  # decoded elements of experts that are multiplied at once: they stay in a core's cache
SMALL = 1 << 16  # elements of a fused weight up to which it is kept decoded: calls would cost more than the memory


class Scratch:
    """One buffer for decoded values; what it gave last is overwritten by the next `take`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._flat = torch.empty(0, dtype=dtype)

    def take(self, *shape: int) -> Tensor:
        n = math.prod(shape)
        if len(self._flat) < n:
            with torch.inference_mode(False):  # or nothing outside of it might write here again
                self._flat = torch.empty(n, dtype=self.dtype)
        return self._flat[:n].view(shape)

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Quantized weights of one shape, stacked."""

    codec: Codec
    parts: Mapping[str, Tensor]  # last component of the stored name -> [B, ...]
    shape: tuple[int, int]  # N, K
    count: int  # B

    def fill(self, out: Tensor) -> None:
        """out of B N K elements, in order."""
        self.codec.decode_parts(self.parts, out.view(self.count, *self.shape))

    def some(self, chosen: Sequence[int]) -> Codes:
        """Those of ascending numbers; without a copy when they follow each other."""
        first, n = chosen[0], len(chosen)
        if chosen[-1] - first == n - 1:
            parts = {leaf: p[first : first + n] for leaf, p in self.parts.items()}
        else:
            at = torch.tensor(chosen)
            parts = {leaf: p.index_select(0, at) for leaf, p in self.parts.items()}
        return Codes(self.codec, parts, self.shape, n)


class Linear:
    """Projections of one input, fused: a weight [N, K] in pieces, one below the other.

    inputs: what the input of a quantized piece is rounded with; None: nothing.
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
            self._dense = self._fill(torch.empty(self.shape, dtype=scratch.dtype))
            self._pieces = ()

    @property
    def rounds_inputs(self) -> bool:
        return self._inputs is not None

    def value(self) -> Tensor:
        """[N, K], valid until the next use of any weight that is kept as codes."""
        return self._dense if self._dense is not None else self._fill(self._scratch.take(*self.shape))

    def opened(self) -> Linear:
        """The same for several uses in a row, decoded once; valid as `value` is."""
        out = copy(self)
        out._dense = self.value()
        return out

    def rows(self) -> tuple[Tensor, ...]:
        """Each piece of a weight that is kept decoded."""
        return () if self._dense is None else self._dense.split(self._lengths)

    def held(self) -> Iterator[Tensor]:
        """What is resident."""
        return _held([self._dense, *self._pieces])

    def __call__(self, x: Tensor, ops: Operations, parts: int = 1) -> Tensor:
        """x [T, K] -> [T, N]; the product over K is summed in `parts` parts."""
        w = self.value()
        if self._inputs is None:
            return ops.linear(x, w, parts)
        rounded = fake_activations(self._inputs, x)
        if all(self._coded):
            return ops.linear(rounded, w, parts)
        each = zip(w.split(self._lengths), self._coded, strict=True)
        return torch.cat([ops.linear(rounded if coded else x, piece, parts) for piece, coded in each], -1)

    def _fill(self, out: Tensor) -> Tensor:
        for piece, rows in zip(self._pieces, out.split(self._lengths), strict=True):
            if isinstance(piece, Codes):
                piece.fill(rows)
            else:
                rows.copy_(piece)
        return out


class Experts:
    """One projection, or several fused, of each expert: [E, N, K], dense or all as codes, B / E of them an expert."""

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
                self._dense = torch.empty(self.shape, dtype=scratch.dtype)
                weights.fill(self._dense)
        else:
            self._dense, self.shape = weights, (weights.shape[0], weights.shape[1], weights.shape[2])

    def dense(self) -> Tensor | None:
        """[E, N, K] where it is kept decoded."""
        return self._dense

    def held(self) -> Iterator[Tensor]:
        """What is resident."""
        return _held([self._dense, self._codes])

    def rounded(self, x: Tensor) -> Tensor:
        """Inputs of these experts, as they are to be given to `__call__`; rows may be of any order."""
        return x if self._inputs is None else fake_activations(self._inputs, x)

    def __call__(self, x: Tensor, counts: Sequence[int], ops: Operations, parts: int = 1) -> Tensor:
        """x [T, K] sorted by expert, counts [E] rows of each -> [T, N]; the product over K is summed in `parts`."""
        if self._dense is not None:
            return ops.grouped_linear(x, self._dense, counts, parts)
        out, start = [], 0
        for chosen in self._together([e for e, n in enumerate(counts) if n]):
            rows = [counts[e] for e in chosen]
            out.append(ops.grouped_linear(x[start : start + sum(rows)], self._decoded(chosen), rows, parts))
            start += sum(rows)
        return out[0] if len(out) == 1 else torch.cat(out) if out else x.new_zeros(0, self.shape[1])

    def _together(self, used: list[int]) -> Iterator[list[int]]:
        n = max(1, _TOGETHER // (self.shape[1] * self.shape[2]))
        return (used[i : i + n] for i in range(0, len(used), n))

    def _decoded(self, chosen: list[int]) -> Tensor:
        """[chosen, N, K]."""
        assert self._codes is not None
        out = self._scratch.take(len(chosen), *self.shape[1:])
        self._codes.some([e * self._fused + i for e in chosen for i in range(self._fused)]).fill(out)
        return out


def _held(things: Sequence[Tensor | Codes | None]) -> Iterator[Tensor]:
    for t in things:
        if isinstance(t, Codes):
            yield from t.parts.values()
        elif t is not None:
            yield t

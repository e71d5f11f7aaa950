"""Checksums that bind routes to the tokens they belong to.

Letters: rows, L MoE layers, K experts per token, W 32-bit words that hold K ids or K gate weights in fp32.

The checksum of a row is

    checksum = A token + B position + sum over layers l, words w of C[l, w] word[l, w]      (mod 2^64)

with fixed 64-bit constants drawn by splitmix64 and `l` the layer's global number; where there are gate weights, the
same sum over their words is added, with other constants. It is a multilinear hash (Lemire, Kaser: Strongly universal
string hashing is fast, 2014), so two unequal rows agree with a probability below 2^-32. It is computed once, where
tokens and routes arrive together, and is kept with the row. It is a sum over layers, so the checksum of some layers is
the whole checksum less the terms of the others, and a pipeline stage can verify its layers alone.

A layer also has a checksum over all rows of a sample, with the positions: it identifies the layer when rows do not
verify. Checksums prove that a trace is what the engine sent for these tokens. They do not prove that the engine
captured the right routes, and they cannot distinguish two rows whose token, position and routes are all equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_WORDS = 1 << 16  # hashed at a time on a CPU: half a MiB
# offsets of disjoint ranges of the stream of constants
_ROW, _LAYER, _POSITION, _WORD, _TOKEN, _GATE_ROW, _GATE_WORD = (i << 40 for i in range(1, 8))


def _constants(index: Tensor, offset: int) -> Tensor:
    """int64 of the shape of `index`: splitmix64 (Steele, Lea, Flood 2014) of offset + index, made odd."""
    with np.errstate(over="ignore"):
        z = (index.cpu().numpy().astype(np.uint64) + np.uint64(offset)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(index.device)


@lru_cache(maxsize=64)
def _row_constants(layers: tuple[int, ...], words: int, offset: int) -> Tensor:
    """[L * W] int64."""
    return _constants(torch.tensor(layers, dtype=torch.int64)[:, None] * 4096 + torch.arange(words), offset).reshape(-1)


def _words(values: Tensor) -> Tensor:
    """[rows, L, K] uint8, int16 or fp32 -> [rows, L, W] int64, each the value of four bytes (the last zero-filled)."""
    rows, layers, k = values.shape
    missing = -(k * values.element_size()) % 4 // values.element_size()
    if missing:
        values = torch.cat([values, values.new_zeros(rows, layers, missing)], -1)
    return values.contiguous().view(torch.int32).to(torch.int64)


def _words_of(values: Tensor) -> int:
    """W of values [rows, L, K]."""
    return -(-values.shape[2] * values.element_size() // 4)


def _parts(values: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of [rows, L, K] and their words [n, L * W]: on a CPU so many that these stay in a core's cache."""
    rows, width = values.shape[0], max(1, values.shape[1] * _words_of(values))
    step = max(1, rows if values.is_cuda else _WORDS // width)
    for begin in range(0, max(1, rows), step):
        part = slice(begin, begin + step)
        yield part, _words(values[part]).flatten(1)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y of int64, one of them a vector. torch has no integer matrix product on CUDA."""
    if not x.is_cuda:
        return x @ y
    return (x * y).sum(-1) if y.ndim == 1 else (x[:, None] * y).sum(0)


def token_term(tokens: Tensor, positions: Tensor) -> Tensor:
    """[rows] int64: the terms of tokens and positions in the checksums of their rows."""
    a, b = _constants(torch.arange(2), _TOKEN).tolist()
    term: Tensor = tokens.long() * a + positions.long() * b
    return term


def expert_term(experts: Tensor, layers: Sequence[int]) -> Tensor:
    """[rows] int64: the term of the ids [rows, L, K] of `layers` (global numbers) in each row's checksum."""
    return _row_term(experts, layers, _ROW)


def gate_term(weights: Tensor, layers: Sequence[int]) -> Tensor:
    """[rows] int64: the term of the bits of gate weights [rows, L, K] fp32 in each row's checksum."""
    return _row_term(weights, layers, _GATE_ROW)


def routes_term(experts: Tensor, weights: Tensor | None, layers: Sequence[int]) -> Tensor:
    """[rows] int64: the terms of ids and, where there are any, gate weights together."""
    ids = expert_term(experts, layers)
    return ids if weights is None else ids + gate_term(weights, layers)


def _row_term(values: Tensor, layers: Sequence[int], offset: int) -> Tensor:
    constants = _row_constants(tuple(layers), _words_of(values), offset).to(values.device)
    return torch.cat([_product(words, constants) for _, words in _parts(values)])


def row_checksums(
    tokens: Tensor,
    experts: Tensor,
    layers: Sequence[int],
    *,
    weights: Tensor | None = None,
    positions: Tensor | None = None,
    start: int = 0,
) -> Tensor:
    """[rows] int64: the checksums of `experts` and gate `weights` [rows, L, K], which belong to `tokens` [rows].

    positions: of each token in its sample; None: start, start + 1, ... Raises ValueError when the lengths differ.
    """
    if len(tokens) != len(experts):
        raise ValueError(f"{len(experts)} routing rows for {len(tokens)} tokens: checksums need one row per token")
    if positions is None:
        positions = torch.arange(start, start + len(tokens), device=tokens.device)
    return token_term(tokens, positions).to(experts.device) + routes_term(experts, weights, layers)


def ragged_arange(starts: Tensor, lengths: Tensor) -> Tensor:
    """[sum(lengths)] int64: the ranges starts[i] .. starts[i] + lengths[i] - 1, concatenated."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=starts.device) + (starts - before).repeat_interleave(lengths)


def layer_sums(experts: Tensor, weights: Tensor | None = None, *, start: int = 0) -> Tensor:
    """[L] int64 over rows at positions start, start + 1, ...; the sums of consecutive rows of a sample add up."""
    ids = _layer_sums(experts, start, _WORD)
    return ids if weights is None else ids + gate_sums(weights, start=start)


def gate_sums(weights: Tensor, *, start: int = 0) -> Tensor:
    """[L] int64: the term of gate weights [rows, L, K] fp32 in `layer_sums`."""
    return _layer_sums(weights, start, _GATE_WORD)


def _layer_sums(values: Tensor, start: int, offset: int) -> Tensor:
    sums = _LayerSums(values, [len(values)], start)
    for part, words in _parts(values):
        sums.add(part, words)
    return sums.result(offset)[0]


def sums_of_samples(
    tokens: Tensor, experts: Tensor, layers: Sequence[int], lengths: Sequence[int], *, positions: Tensor, start: int
) -> tuple[Tensor, Tensor]:
    """([rows], [N, L]) int64: `row_checksums`, and `layer_sums` of each of N concatenated samples of `lengths` rows
    from position `start` on. All are read once, in one pass: a step has hundreds of short ones."""
    constants = _row_constants(tuple(layers), _words_of(experts), _ROW).to(experts.device)
    sums, terms = _LayerSums(experts, lengths, start), list[Tensor]()
    for part, words in _parts(experts):
        terms.append(_product(words, constants))
        sums.add(part, words)
    return token_term(tokens, positions).to(experts.device) + torch.cat(terms), sums.result(_WORD)


class _LayerSums:
    """The sums of each layer of several samples, of one part of the rows after the other."""

    def __init__(self, values: Tensor, lengths: Sequence[int], start: int) -> None:
        device, self._shape = values.device, (len(lengths), values.shape[1], _words_of(values))
        self._at = _constants(torch.arange(start, start + max(lengths, default=0), device=device), _POSITION)
        self._owner: Tensor | None = None  # [rows]: the sample of each, where there are several
        if len(lengths) != 1:
            rows = torch.tensor(lengths, dtype=torch.int64, device=device)
            self._at = self._at[ragged_arange(torch.zeros_like(rows), rows)]
            self._owner = torch.repeat_interleave(rows)
        self._sums = torch.zeros(len(lengths), values.shape[1] * self._shape[2], dtype=torch.int64, device=device)

    def add(self, part: slice, words: Tensor) -> None:
        at = self._at[part]
        if self._owner is None:
            self._sums += _product(at, words)
        else:
            self._sums.index_add_(0, self._owner[part], at[:, None] * words)

    def result(self, offset: int) -> Tensor:
        words = _constants(torch.arange(self._shape[2], device=self._sums.device), offset)
        return (self._sums.view(self._shape) * words).sum(-1)


def layer_terms(layers: Sequence[int]) -> Tensor:
    """[L] int64: the term of a layer's number; the checksum of a layer is this plus its `layer_sums`."""
    return _constants(torch.tensor(tuple(layers), dtype=torch.int64), _LAYER)

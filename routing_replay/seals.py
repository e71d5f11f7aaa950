"""Checksums that tie routes to the tokens they belong to.

Letters: rows, L MoE layers, K experts a token, W 32-bit words that hold K ids or K gate weights in fp32.

The seal of a row is

    seal = A token + B position + sum over layers l, words w of C[l, w] word[l, w]      (mod 2^64)

with fixed 64-bit constants drawn by splitmix64 and `l` the layer's global number; where there are gate weights, the
same sum over their words is added, with constants of its own. It is a multilinear hash (Lemire, Kaser: Strongly
universal string hashing is fast, 2014), so two unequal rows agree with a chance below 2^-32. It is made once, where
tokens and routes come in together, and travels with the row. Being a sum over layers, it can be cut: the seal of some
layers is the seal less what the others contribute, so a pipeline stage can verify its own part.

A layer has a seal over all rows of a sample, the position in it: it names the layer when rows do not verify. Seals say
that a trace is what the engine sent for these tokens, not that the engine captured the right thing, and nothing about
two rows whose token, position and routes are all equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

# disjoint parts of the constants' stream
_ROW, _LAYER, _POSITION, _WORD, _TOKEN, _GATE_ROW, _GATE_WORD = (i << 40 for i in range(1, 8))


def _constants(of: Tensor, part: int) -> Tensor:
    """int64 of `of`'s shape: splitmix64 (Steele, Lea, Flood 2014) of part + of, made odd."""
    with np.errstate(over="ignore"):
        z = (of.cpu().numpy().astype(np.uint64) + np.uint64(part)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(of.device)


@lru_cache(maxsize=64)
def _row_constants(layers: tuple[int, ...], words: int, part: int) -> Tensor:
    """[L * W] int64."""
    return _constants(torch.tensor(layers, dtype=torch.int64)[:, None] * 4096 + torch.arange(words), part).reshape(-1)


def _words(of: Tensor) -> Tensor:
    """[rows, L, K] uint8, int16 or fp32 -> [rows, L, W] int64, each the value of four bytes (the last zero-filled)."""
    rows, layers, k = of.shape
    missing = -(k * of.element_size()) % 4 // of.element_size()
    if missing:
        of = torch.cat([of, of.new_zeros(rows, layers, missing)], -1)
    return of.contiguous().view(torch.int32).to(torch.int64)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y of int64, one of them a vector. There is no integer matrix product on CUDA."""
    if not x.is_cuda:
        return x @ y
    return (x * y).sum(-1) if y.ndim == 1 else (x[:, None] * y).sum(0)


def token_part(tokens: Tensor, positions: Tensor) -> Tensor:
    """[rows] int64: what tokens and positions contribute to their rows' seals."""
    a, b = _constants(torch.arange(2), _TOKEN).tolist()
    part: Tensor = tokens.long() * a + positions.long() * b
    return part


def expert_part(experts: Tensor, layers: Sequence[int]) -> Tensor:
    """[rows] int64: what the ids [rows, L, K] of `layers` (global numbers) contribute to their rows' seals."""
    return _row_part(experts, layers, _ROW)


def gate_part(weights: Tensor, layers: Sequence[int]) -> Tensor:
    """[rows] int64: what gate weights [rows, L, K] fp32, bit for bit, contribute to their rows' seals."""
    return _row_part(weights, layers, _GATE_ROW)


def route_part(experts: Tensor, weights: Tensor | None, layers: Sequence[int]) -> Tensor:
    """[rows] int64: what ids and, where there are any, gate weights contribute."""
    ids = expert_part(experts, layers)
    return ids if weights is None else ids + gate_part(weights, layers)


def _row_part(of: Tensor, layers: Sequence[int], part: int) -> Tensor:
    words = _words(of)
    constants = _row_constants(tuple(layers), words.shape[2], part).to(words.device)
    return _product(words.flatten(1), constants)


def row_seals(
    tokens: Tensor,
    experts: Tensor,
    layers: Sequence[int],
    *,
    weights: Tensor | None = None,
    positions: Tensor | None = None,
    start: int = 0,
) -> Tensor:
    """[rows] int64, the seals of `experts` [rows, L, K], with gates `weights` [rows, L, K], fed with `tokens` [rows].

    positions: of each token in its sample; None: start, start + 1, ... Raises ValueError when the lengths differ.
    """
    if len(tokens) != len(experts):
        raise ValueError(f"{len(experts)} routing rows cannot be sealed with {len(tokens)} tokens")
    if positions is None:
        positions = torch.arange(start, start + len(tokens), device=tokens.device)
    return token_part(tokens, positions).to(experts.device) + route_part(experts, weights, layers)


def ragged_arange(starts: Tensor, lengths: Tensor) -> Tensor:
    """starts[i], starts[i] + 1, ... of length lengths[i], one after the other: [sum(lengths)] int64."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=starts.device) + (starts - before).repeat_interleave(lengths)


def layer_sums(experts: Tensor, weights: Tensor | None = None, *, start: int = 0) -> Tensor:
    """[L] int64 over rows at positions start, start + 1, ...: adds up over parts of a sample."""
    ids = layer_sums_of(experts, [len(experts)], start=start)[0]
    return ids if weights is None else ids + gate_sums(weights, start=start)


def gate_sums(weights: Tensor, *, start: int = 0) -> Tensor:
    """[L] int64: what gate weights [rows, L, K] fp32 contribute to `layer_sums`."""
    return layer_sums_of(weights, [len(weights)], start=start, part=_GATE_WORD)[0]


def layer_sums_of(experts: Tensor, lengths: Sequence[int], *, start: int = 0, part: int = _WORD) -> Tensor:
    """[N, L] int64: the same of N samples end to end, `lengths` rows of each, all at once: a step has hundreds."""
    words = _words(experts)
    layers, w = words.shape[1:]
    longest = max(lengths, default=0)
    constants = _constants(torch.arange(start, start + longest, device=words.device), _POSITION)
    if len(lengths) == 1:
        sums = _product(constants, words.flatten(1))[None]
    else:
        of = torch.tensor(lengths, dtype=torch.int64, device=words.device)
        at = constants[ragged_arange(torch.zeros_like(of), of)]
        owner = torch.repeat_interleave(of)
        sums = words.new_zeros(len(lengths), layers * w)
        sums.index_add_(0, owner, at[:, None] * words.flatten(1))
    return (sums.view(-1, layers, w) * _constants(torch.arange(w, device=words.device), part)).sum(-1)


def layer_numbers(layers: Sequence[int]) -> Tensor:
    """[L] int64: what a layer's number contributes to its seal; a layer's seal is this plus its sum."""
    return _constants(torch.tensor(tuple(layers), dtype=torch.int64), _LAYER)

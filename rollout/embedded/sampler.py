"""Drawing tokens, the same whatever else is in the batch.

The random number of a token is a function of (sampling seed, sample index, position) alone: a counter run through
splitmix64's finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), so there is no
generator whose state other requests could move.

Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.embedded.operations import Operations

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer: a bijection of 64 bits, each output bit depending on all input bits."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream_keys(seed: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """[G] 64-bit keys of the samples `indices` of a request with `seed`."""
    with np.errstate(over="ignore"):
        base = mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GOLDEN)
        return mix(base + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def uniform(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """[B] in [0, 1), of 53 bits."""
    with np.errstate(over="ignore"):
        bits = mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """How each row is drawn."""

    keys: NDArray[np.uint64]  # [B]
    positions: NDArray[np.int64]  # [B], of the token to draw
    temperature: NDArray[np.float32]  # [B]; 0 is greedy
    top_p: NDArray[np.float32]  # [B]; 1 is off
    top_k: NDArray[np.int64]  # [B]; -1 is off


def sample(logits: Tensor, draw: Draw, ops: Operations) -> tuple[Tensor, Tensor]:
    """logits [B, V] -> tokens int64 [B] and their log-probs fp32 [B].

    A log-prob is that of softmax(logits / temperature), before top-k and top-p cut it (SGLang's convention); of the raw
    logits when greedy.
    """
    x = logits.float()
    greedy = draw.temperature == 0
    if not (draw.temperature == 1).all():
        x = x / torch.from_numpy(np.where(greedy, 1.0, draw.temperature).astype(np.float32))[:, None]
    if greedy.all():
        tokens = x.argmax(-1)
        return tokens, ops.logprob(x, tokens, ops.parts)
    u = torch.from_numpy(uniform(draw.keys, draw.positions))
    cut = (draw.top_p < 1) | (draw.top_k > 0)
    tokens = _inverse(x.softmax(-1), u) if not cut.all() else torch.zeros(len(x), dtype=torch.int64)
    if cut.any():
        rows = torch.from_numpy(cut.nonzero()[0])
        top_p, top_k = torch.from_numpy(draw.top_p)[rows], torch.from_numpy(draw.top_k)[rows]
        tokens[rows] = _draw_cut(x[rows], u[rows], top_p, top_k)
    if greedy.any():
        rows = torch.from_numpy(greedy.nonzero()[0])
        tokens[rows] = x[rows].argmax(-1)
    return tokens, ops.logprob(x, tokens, ops.parts)


def _inverse(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse distribution function of weights [B, V] at u [B]; a weight of 0 is never drawn.

    The sum runs in fp64: in fp32 the far end of a large vocabulary would round away.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def _draw_cut(x: Tensor, u: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Keeps the `top_k` likeliest, then the fewest of all tokens whose probability reaches `top_p`; ties: lower id."""
    p, ids = x.softmax(-1).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(p.shape[1])
    limit = torch.where(top_k > 0, top_k, p.shape[1])[:, None]
    p = p.masked_fill(rank >= limit, 0.0)
    before = p.cumsum(-1, dtype=torch.float64) - p
    reach = top_p.double()[:, None] * p.sum(-1, keepdim=True, dtype=torch.float64)
    p = p.masked_fill((before >= reach) & (rank > 0), 0.0)
    return ids.gather(1, _inverse(p, u)[:, None])[:, 0]

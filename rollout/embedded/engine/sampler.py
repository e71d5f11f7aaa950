"""Batch-invariant sampling of tokens from SGLang's distribution.

The rule is that of SGLang 0.5.23's PyTorch sampler, which its deterministic mode uses too, for a request that is alone
in its batch. `top_k`, `top_p` and `min_p` are applied together, each to the softmax of logits / temperature over the
whole vocabulary: a token is kept if fewer than `top_k` tokens come before it, if those before it have at most `top_p`
of the mass, and if its probability is at least `min_p` times the largest. FlashInfer's kernels differ in two ways:
tokens of equal probability are kept or dropped together, and with min_p > 0 top-p is applied to the renormalised
result of top-k.

The random number of a token is a function of (sampling seed, sample index, position) alone: splitmix64's finalizer
(Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) of a counter. There is no generator
state that other requests could change.

Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.embedded.device.transfers import HOST, Transfers
from rollout.embedded.kernels.chosen import by_triton
from rollout.embedded.model.operations import Operations

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_GREEDY_BELOW = np.float32(1e-6)


def mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer: a bijection on 64 bits in which each output bit depends on all input bits."""
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
    """[B] in [0, 1), with 53 random bits."""
    with np.errstate(over="ignore"):
        bits = mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """Sampling parameters of each row."""

    keys: NDArray[np.uint64]  # [B]
    positions: NDArray[np.int64]  # [B], of the token to sample
    temperature: NDArray[np.float32]  # [B]; below 1e-6: greedy
    top_p: NDArray[np.float32]  # [B]; 1 is off
    top_k: NDArray[np.int64]  # [B]; -1 is off, 1 is greedy
    min_p: NDArray[np.float32]  # [B]; 0 is off

    @property
    def greedy(self) -> NDArray[np.bool_]:
        """[B]"""
        return np.asarray((self.temperature < _GREEDY_BELOW) | (self.top_k == 1), np.bool_)

    @property
    def divisors(self) -> NDArray[np.float32]:
        """[B]: what logits are divided by, in the distribution of the reported log-probs."""
        return np.where(self.greedy, np.float32(1), self.temperature)

    @property
    def cut(self) -> NDArray[np.bool_]:
        """[B]: drawn from a part of the vocabulary."""
        return np.asarray(((self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0)) & ~self.greedy, np.bool_)


def sample(logits: Tensor, draw: Draw, ops: Operations, transfers: Transfers = HOST) -> tuple[Tensor, Tensor]:
    """logits [B, V] -> tokens int64 [B] and their log-probs fp32 [B], on the device of `transfers` as the logits.

    Log-probs are those of softmax(logits / temperature) over the whole vocabulary, before top-k, top-p and min-p; for
    greedy rows those of the raw logits at any temperature. Both are SGLang's convention.
    """
    if by_triton(logits):
        return _by_kernel(logits, draw, transfers)
    x = logits.float()
    greedy = draw.greedy
    temperature = draw.divisors
    cut = draw.cut
    host = (temperature, uniform(draw.keys, draw.positions), cut.nonzero()[0], greedy.nonzero()[0])
    at_cut = (a[cut] for a in (draw.top_p, draw.top_k, draw.min_p))
    divisors, u, cut_rows, greedy_rows, top_p, top_k, min_p = transfers.send(*map(torch.from_numpy, (*host, *at_cut)))
    if not (temperature == 1).all():
        x = x / divisors[:, None]
    if greedy.all():
        tokens = x.argmax(-1)
        return tokens, ops.logprob(x, tokens, ops.tp_shards)
    tokens = _inverse(x.softmax(-1), u) if not cut.all() else torch.zeros_like(u, dtype=torch.int64)
    if cut.any():
        weights, ids = kept(x[cut_rows].softmax(-1), top_p=top_p, top_k=top_k, min_p=min_p)
        tokens[cut_rows] = ids.gather(1, _inverse(weights, u[cut_rows])[:, None])[:, 0]
    if greedy.any():
        tokens[greedy_rows] = x[greedy_rows].argmax(-1)
    return tokens, ops.logprob(x, tokens, ops.tp_shards)


def _by_kernel(logits: Tensor, draw: Draw, transfers: Transfers) -> tuple[Tensor, Tensor]:
    """`sample` by a Triton kernel; rows with top-k, top-p or min-p are drawn from sorted probabilities after it."""
    from rollout.embedded.kernels.drawing import draw_tokens

    cut, u = draw.cut, uniform(draw.keys, draw.positions)
    places = np.where(draw.greedy, -1.0, u)
    host = (draw.divisors, places, cut.nonzero()[0], u[cut], draw.top_p[cut], draw.top_k[cut], draw.min_p[cut])
    divisors, sent, rows, u_cut, top_p, top_k, min_p = transfers.send(*map(torch.from_numpy, host))
    tokens, logprobs = draw_tokens(logits, divisors, sent)
    if cut.any():
        x = logits[rows].float() / divisors[rows][:, None]
        weights, ids = kept(x.softmax(-1), top_p=top_p, top_k=top_k, min_p=min_p)
        chosen = ids.gather(1, _inverse(weights, u_cut)[:, None])
        tokens[rows], logprobs[rows] = chosen[:, 0], x.log_softmax(-1).gather(1, chosen)[:, 0]
    return tokens, logprobs


def likeliest(
    logits: Tensor, draw: Draw, row: int, count: int, transfers: Transfers = HOST
) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens of a row of logits [B, V] and their log-probs, in the distribution that `sample`
    gives the log-prob of its token in."""
    if not count:
        return ()
    found = (logits[row].float() / float(draw.divisors[row])).log_softmax(-1).topk(min(count, logits.shape[1]))
    values, ids = transfers.fetch(found.values, found.indices)
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))


def kept(p: Tensor, *, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities p [B, V], parameters [B] -> (weights [B, V], likeliest first, 0 where dropped; token ids [B, V]).

    All three rules apply to the original `p`; the likeliest token is always kept. Of equal ones the lower id comes
    first. The mass before a token is summed in fp64; SGLang's fp32 sums may decide differently within 1e-6 of `top_p`.
    """
    p, ids = p.sort(dim=-1, descending=True, stable=True)
    limit = torch.where(top_k > 0, top_k, p.shape[1])[:, None]
    reach = torch.where(top_p < 1, top_p.double(), torch.inf)[:, None]  # the whole sum may round to above 1
    before = p.cumsum(-1, dtype=torch.float64) - p
    places = torch.arange(p.shape[1], device=p.device)
    dropped = (places >= limit) | (before > reach) | (p < p[:, :1] * min_p[:, None])
    return p.masked_fill(dropped, 0.0), ids


def _inverse(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse distribution function of weights [B, V] at u [B]; a weight of 0 is never drawn.

    The sum is fp64: in fp32 the last tokens of a large vocabulary would be lost to rounding.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True)[:, 0].clamp_(max=weights.shape[1] - 1)

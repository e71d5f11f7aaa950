"""Verifies the assumptions of the exact operations on this machine, and computes a fingerprint of their results.

Two processes with equal fingerprints have the same torch version, and libraries and processors that compute the same
bits for a number of shapes. Trainer and rollout compare their fingerprints before training starts: another instruction
set gives other sums. The test takes a fraction of a second.

Letters: T rows, K columns, N outputs, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from quant.exact import attention, logprobs, products, routing, rows

_ROWS = 80
_SHAPES = ((64, 64), (96, 192), (256, 48), (2048, 256))  # (K, N)
_SLICES = ((0, 1), (0, 7), (5, 22), (16, 80))  # rows that are computed in separate calls
Case = tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]  # name, operation, its inputs of T rows


def fingerprint() -> str:
    """Hexadecimal fingerprint of this process with its number of threads. Raises ValueError where the bits of a row
    depend on other rows: trainer and rollout could not agree."""
    digest = hashlib.sha256(torch.__version__.encode())
    with torch.no_grad():
        for name, operation, inputs in _cases():
            whole = operation(*inputs)
            for first, end in _SLICES:
                _check(name, operation(*(x[first:end] for x in inputs)), whole[first:end])
            digest.update(whole.float().numpy().tobytes())
    return digest.hexdigest()[:16]


def _check(name: str, one: Tensor, other: Tensor) -> None:
    if not torch.equal(one, other):
        raise ValueError(
            f"alignment.deterministic: on this machine the bits of a row of {name} depend on the other rows, so "
            "trainer and rollout cannot agree bit for bit: set it to false"
        )


def _cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        yield from _of_dtype(dtype)
    logits, positions = _numbers(_ROWS, 16), torch.arange(_ROWS)
    yield "a sigmoid router", partial(_gates, "sigmoid"), (logits,)
    yield "a softmax router", partial(_gates, "softmax"), (logits,)
    yield "a rotation", _angles, (positions,)


def _of_dtype(dtype: torch.dtype) -> Iterator[Case]:
    for k, n in _SHAPES:
        x, w = _numbers(_ROWS, k).to(dtype), (_numbers(n, k) * k**-0.5).to(dtype)
        name = f"a product of {k} columns in {dtype}"
        yield name, partial(products.linear, w=w), (x,)
        half = products.linear(x, w[: n // 2])
        _check(name, half, products.linear(x, w)[:, : n // 2])
    x, gate = _numbers(_ROWS, 96).to(dtype), _numbers(_ROWS, 1)
    yield f"a norm in {dtype}", partial(rows.rmsnorm, w=_numbers(96, 1)[:, 0].to(dtype), eps=1e-6), (x,)
    yield f"a gated unit in {dtype}", rows.swiglu, (x, gate)
    yield f"attention in {dtype}", partial(_attention, dtype), (torch.arange(_ROWS),)
    logits, label = (4 * _numbers(_ROWS, 5000)).to(dtype), torch.arange(_ROWS) * 61
    for shards in (1, 2):
        yield f"a log-probability of {dtype} logits", partial(logprobs.logprob, shards=shards), (logits, label)


def _gates(score: routing.Score, logits: Tensor) -> Tensor:
    scores = routing.scores(logits, score)
    ids = routing.choose(scores, 4, groups=4, group_topk=2)
    return torch.cat([ids, routing.gates(scores, ids)], -1)


def _angles(positions: Tensor) -> Tensor:
    angle = positions[:, None] * 0.37
    return torch.cat([angle.cos(), angle.sin()], -1)


def _attention(dtype: torch.dtype, positions: Tensor) -> Tensor:
    """Attention of queries at consecutive positions of one sequence, each over the keys up to its position."""
    q, k, v = (_numbers(_ROWS, h * 48).view(1, _ROWS, h, 48).to(dtype) for h in (4, 2, 2))
    seen = int(positions[-1]) + 1
    return attention.attention(q[:, positions], k[:, :seen], v[:, :seen], 0.3, positions[:1])[0]


def _numbers(t: int, k: int) -> Tensor:
    """fp32 [t, k] in (-1, 1), the same on every machine."""
    n = torch.arange(t * k, dtype=torch.int64).view(t, k)
    return ((n * 2654435761 + k * 40503) % 65521).float() / 32760.5 - 1.0

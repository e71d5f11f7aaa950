"""What the exact operations assume of a machine, looked at on it, and a fingerprint of the bits that they give there.

Two processes whose fingerprints are equal have the same torch, and libraries and a processor that compute the same bits
for a number of shapes. Both sides of a run compare theirs before anything is trained: another instruction set gives
other sums. It takes a fraction of a second.

Letters: T rows, K columns, N outputs, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quant.exact import attention, logprobs, products, routing, rows

_ROWS = 80
_SHAPES = ((64, 64), (96, 192), (256, 48), (2048, 256))  # (K, N)
_SLICES = ((0, 1), (0, 7), (5, 22), (16, 80))  # rows that are computed by themselves
Operation = Callable[[slice], Tensor]  # of some rows


def fingerprint() -> str:
    """Hexadecimal, of this process with its number of threads. Raises ValueError where a row's bits depend on its
    neighbours, so that no two sides can be made equal."""
    digest = hashlib.sha256(torch.__version__.encode())
    with torch.no_grad():
        for name, operation, slices in _operations():
            whole = operation(slice(0, _ROWS))
            for first, end in slices:
                if not torch.equal(operation(slice(first, end)), whole[first:end]):
                    raise ValueError(
                        f"alignment.deterministic: on this machine {name} gives a row other bits in another batch, so "
                        "trainer and rollout cannot agree bit for bit: set it to false"
                    )
            digest.update(whole.float().numpy().tobytes())
    return digest.hexdigest()[:16]


def _operations() -> Iterator[tuple[str, Operation, tuple[tuple[int, int], ...]]]:
    """(name, operation on rows of fixed inputs, runs of rows that must be those of the whole)."""
    for dtype in (torch.bfloat16, torch.float32):
        for k, n in _SHAPES:
            x, w = _numbers(_ROWS, k).to(dtype), (_numbers(n, k) * k**-0.5).to(dtype)
            yield f"a product of {k} columns in {dtype}", lambda s, x=x, w=w: products.linear(x[s], w), _SLICES
            half = f"half a product of {k} columns in {dtype}"
            yield half, lambda s, x=x, w=w, n=n: products.linear(x[s], w[: n // 2]), _SLICES
            if not torch.equal(products.linear(x, w[: n // 2]), products.linear(x, w)[:, : n // 2]):
                raise ValueError(
                    f"alignment.deterministic: on this machine a product of {k} columns in {dtype} depends on how many "
                    "outputs are computed together, so trainer and rollout cannot agree bit for bit: set it to false"
                )
        x, w = _numbers(_ROWS, 96).to(dtype), _numbers(96, 1)[:, 0].to(dtype)
        yield f"a norm in {dtype}", lambda s, x=x, w=w: rows.rmsnorm(x[s], w, 1e-6), _SLICES
        gate = _numbers(_ROWS, 1)
        yield f"a gated unit in {dtype}", lambda s, x=x, g=gate: rows.swiglu(x[s], g[s]), _SLICES
        yield f"attention in {dtype}", _attention(dtype), _SLICES
        logits = (4 * _numbers(_ROWS, 5000)).to(dtype)
        label = torch.arange(_ROWS) * 61
        of_labels = "a log-probability"
        yield of_labels, lambda s, x=logits, t=label: logprobs.logprob(x[s], t[s]), _SLICES
        yield of_labels, lambda s, x=logits, t=label: logprobs.logprob(x[s], t[s], 2), _SLICES
    x, angles = _numbers(_ROWS, 16), torch.arange(_ROWS)[:, None] * 0.37
    for score in ("sigmoid", "softmax"):
        yield f"a router's {score}", lambda s, x=x, how=score: _gates(x[s], how), _SLICES
    yield "a rotation", lambda s: torch.cat([angles[s].cos(), angles[s].sin()], -1), _SLICES


def _gates(logits: Tensor, score: routing.Score) -> Tensor:
    scores = routing.scores(logits, score)
    ids = routing.choose(scores, 4, groups=4, group_topk=2)
    return torch.cat([ids, routing.gates(scores, ids)], -1)


def _attention(dtype: torch.dtype) -> Operation:
    """Rows are the queries of one sequence, each with the keys before it."""
    q, k, v = (_numbers(_ROWS, h * 48).view(1, _ROWS, h, 48).to(dtype) for h in (4, 2, 2))

    def run(s: slice) -> Tensor:
        seen = slice(0, s.stop)
        return attention.attention(q[:, s], k[:, seen], v[:, seen], 0.3, torch.tensor([s.start]))[0]

    return run


def _numbers(t: int, k: int) -> Tensor:
    """fp32 [t, k] in (-1, 1), the same everywhere."""
    n = torch.arange(t * k, dtype=torch.int64).view(t, k)
    return ((n * 2654435761 + k * 40503) % 65521).float() / 32760.5 - 1.0

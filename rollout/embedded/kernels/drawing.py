"""Triton kernels that draw tokens from softmax(logits / temperature) over a vocabulary, and take their log-probs.

The first reads a row of logits once, in blocks, and keeps of each block its largest logit and its sum of exponentials.
The second finds by these the block in which the token lies, reads that block again, and draws inside it. So a row moves
little more than its own bytes; the plain way moves about forty for a logit, a half of them for sums in fp64. Sums are
in fp64 here too. docs/gpu.md has the times.

Letters: B rows, V vocabulary, N blocks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits that a program reads
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _exps(x, top):
    """exp(x - top) in fp64, 0 for -inf even where the largest is."""
    return tl.exp(x - tl.where(top == float("-inf"), 0.0, top)).to(tl.float64)


@triton.jit
def _scaled(logits, row, at, columns, divisors):
    x = tl.load(logits + row * columns + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, tl.load(divisors + row))


@triton.jit
def blocks_kernel(logits, divisors, tops, sums, places, columns, BLOCK: tl.constexpr):
    """A program: block n of row b of logits [B, V] / divisors [B] -> its largest value, tops fp32 [B, N]; its sum of
    exponentials of the distance to it, sums fp64 [B, N]; the first column with the largest value, places int32."""
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = n * BLOCK + tl.arange(0, BLOCK)
    x = _scaled(logits, row, at, columns, divisors)
    top = tl.max(x, 0)
    into = row * tl.num_programs(1) + n
    tl.store(tops + into, top)
    tl.store(sums + into, tl.sum(_exps(x, top), 0))
    tl.store(places + into, tl.min(tl.where(x == top, at, columns - 1), 0))


@triton.jit
def draw_kernel(
    logits,
    divisors,
    u,
    tops,
    sums,
    places,
    tokens,
    logprobs,
    columns,
    blocks,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program: one row. u fp64 [B] in [0, 1): the place in the distribution of the token that is drawn; below 0 the
    likeliest is, the first of equal ones. tokens int64 [B], logprobs fp32 [B]."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCKS)
    there = n < blocks
    own = tl.load(tops + row * blocks + n, mask=there, other=float("-inf"))
    top = tl.max(own, 0)
    # of each block, of the row's largest value
    weights = tl.load(sums + row * blocks + n, mask=there, other=0.0) * _exps(own, top)
    total = tl.sum(weights, 0)
    asked = tl.load(u + row)
    if asked < 0:
        first = tl.load(places + row * blocks + n, mask=there, other=_NONE)
        token = tl.min(tl.where(there & (own == top), first, columns - 1), 0)
    else:
        target = asked * total
        upto = tl.cumsum(weights, 0)
        last = tl.max(tl.where(weights > 0, n, 0), 0)
        block = tl.minimum(tl.sum((there & (upto <= target)).to(tl.int32), 0), last)
        at = block * BLOCK + tl.arange(0, BLOCK)
        of_block = tl.load(tops + row * blocks + block)
        exps = _exps(_scaled(logits, row, at, columns, divisors), of_block)
        before = tl.sum(tl.where(n < block, weights, 0.0), 0)
        inner = (target - before) / _exps(of_block, top)
        final = tl.max(tl.where(exps > 0, tl.arange(0, BLOCK), 0), 0)
        token = block * BLOCK + tl.minimum(tl.sum((tl.cumsum(exps, 0) <= inner).to(tl.int32), 0), final)
    chosen = tl.div_rn(tl.load(logits + row * columns + token).to(tl.float32), tl.load(divisors + row))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, chosen - top - tl.log(total.to(tl.float32)))


def draw_tokens(logits: Tensor, divisors: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, V] -> tokens int64 [B] and their natural log-probabilities fp32 [B] in softmax(logits / divisors).

    divisors fp32 [B]; u fp64 [B] in [0, 1), below 0 for the likeliest token. A token of weight 0 is never drawn. A row
    with NaN has the log-probability NaN.
    """
    logits, (rows, columns) = logits.contiguous(), logits.shape
    block = min(BLOCK, max(16, triton.next_power_of_2(columns)))
    blocks = triton.cdiv(columns, block)
    tops = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    sums, places = torch.empty_like(tops, dtype=torch.float64), torch.empty_like(tops, dtype=torch.int32)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        blocks_kernel[(rows, blocks)](logits, divisors, tops, sums, places, columns, BLOCK=block, num_warps=8)
        found = (tops, sums, places, tokens, logprobs, columns, blocks)
        of_row = triton.next_power_of_2(blocks)
        draw_kernel[(rows,)](logits, divisors, u, *found, BLOCKS=of_row, BLOCK=block, num_warps=8)
    return tokens, logprobs

"""Triton kernels for the attention of decoded tokens over the paged cache, which they read in place.

The plain way copies the keys and values of a batch out of the cache, once or twice, before it multiplies. The kernel
reads each row of the cache once for every tile of query heads that shares it, and keeps scores in registers. The keys
of a sequence are divided into splits of one size, so that a few long sequences occupy the device too; a second kernel
adds the splits up. Splits depend on the shapes of a batch alone, so a batch repeats its bits.

Letters: B sequences, H query heads, D dimensions of a query and a key, V of a value, L longest sequence, S splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.embedded.kernels.cache_layout import CacheLayout

KEYS = 32  # that a program reads at a time
_LEAST = 16  # rows of a matrix product
_EACH = 256  # keys of a split, at least
_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
WARPS, STAGES = 4, 2


@triton.jit
def _part(rows, some, COUNT: tl.constexpr, PAD: tl.constexpr):
    """COUNT elements from each of the pointers `rows`, zeros up to PAD and where not `some`."""
    column = tl.arange(0, PAD)
    return tl.load(rows[:, None] + column[None, :], mask=some[:, None] & (column < COUNT)[None, :], other=0.0)


@triton.jit
def split_kernel(
    q,
    cache,
    key_slots,
    q_start,
    partial,
    sums,
    longest,
    width,
    each,
    scale,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    VALUE: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    PAD_FIRST: tl.constexpr,
    PAD_SECOND: tl.constexpr,
    PAD_VALUE: tl.constexpr,
):
    """A program: a tile of the SHARED query heads of one key head, and one split of the keys of one sequence.

    q [B, HEADS, FIRST + SECOND]; partial fp32 [B, HEADS, S, VALUE], the outputs over each split; sums fp32 [B, HEADS,
    S], logarithms of their sums of exponentials, -inf for no key. SECOND > 0: the value is the key's first part.
    """
    b, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    TILES: tl.constexpr = (SHARED + TILE - 1) // TILE
    group, in_group = tl.program_id(0) // TILES, (tl.program_id(0) % TILES) * TILE + tl.arange(0, TILE)
    some, head = in_group < SHARED, b * HEADS + group * SHARED + in_group
    first = _part(q + head * (FIRST + SECOND), some, FIRST, PAD_FIRST)
    if SECOND:
        second = _part(q + head * (FIRST + SECOND) + FIRST, some, SECOND, PAD_SECOND)
    stop = tl.minimum((split + 1) * each, tl.load(q_start + b).to(tl.int32) + 1)
    top, total = tl.full((TILE,), float("-inf"), tl.float32), tl.zeros((TILE,), tl.float32)
    out = tl.zeros((TILE, PAD_VALUE), tl.float32)
    for a in range(split * each, stop, KEYS):
        at = a + tl.arange(0, KEYS)
        inside = at < stop
        own = cache + tl.load(key_slots + b * longest + at, mask=inside, other=0) * width
        key = _part(own + group * (FIRST + SECOND), inside, FIRST, PAD_FIRST)
        scores = tl.dot(first, tl.trans(key))
        if SECOND:
            scores += tl.dot(
                second, tl.trans(_part(own + group * (FIRST + SECOND) + FIRST, inside, SECOND, PAD_SECOND))
            )
            value = key
        else:
            value = _part(own + HEADS // SHARED * FIRST + group * VALUE, inside, VALUE, PAD_VALUE)
        scores = tl.where(inside[None, :], scores * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p, factor = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
        total = total * factor + tl.sum(p, 1)
        out = out * factor[:, None] + tl.dot(p.to(value.dtype), value)
        top = higher
    place, column = head * tl.num_programs(2) + split, tl.arange(0, PAD_VALUE)
    tl.store(sums + place, top + tl.log(total), mask=some)
    out, kept = tl.where(total[:, None] == 0.0, 0.0, out / total[:, None]), some[:, None] & (column < VALUE)[None, :]
    tl.store(partial + place[:, None] * VALUE + column[None, :], out, mask=kept)


@triton.jit
def join_kernel(partial, sums, out, splits, VALUE: tl.constexpr, SPLITS: tl.constexpr, PAD_VALUE: tl.constexpr):
    """A program: one row of out [B * H, VALUE] from its splits."""
    row = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, PAD_VALUE)
    logs = tl.load(sums + row * splits + split, mask=split < splits, other=float("-inf"))
    weights = tl.exp(logs - tl.max(logs, 0))
    inside = (split < splits)[:, None] & (column < VALUE)[None, :]
    parts = tl.load(partial + (row * splits + split[:, None]) * VALUE + column[None, :], mask=inside, other=0.0)
    joined = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + row * VALUE + column, joined.to(out.dtype.element_ty), mask=column < VALUE)


def tile_of(layout: CacheLayout, heads: int) -> dict[str, int]:
    """The constants of `split_kernel` for `heads` query heads."""
    first, second = layout.parts
    padded = {"PAD_FIRST": first, "PAD_SECOND": second, "PAD_VALUE": layout.value}
    return {
        "HEADS": heads,
        "SHARED": heads // layout.heads,
        "FIRST": first,
        "SECOND": second,
        "VALUE": layout.value,
        "TILE": _LEAST,
        "KEYS": KEYS,
        **{name: max(_LEAST, triton.next_power_of_2(n)) for name, n in padded.items()},
    }


def splits_of(sequences: int, tiles: int, longest: int) -> tuple[int, int]:
    """(number of splits, keys of each) for so many sequences, tiles of heads, and the longest sequence."""
    wanted = triton.cdiv(_PROGRAMS, max(1, sequences * tiles))
    each = max(_EACH, triton.cdiv(triton.cdiv(longest, wanted), KEYS) * KEYS)
    return triton.cdiv(longest, each), each


def attend_in_place(
    q: Tensor, cache: Tensor, key_slots: Tensor, q_start: Tensor, scale: float, layout: CacheLayout
) -> Tensor:
    """q [B, H, D], one query a sequence, over cache [slots, width] -> [B, H, V] in q's dtype.

    key_slots int64 [B, L]: the slot of each position, any slot past the end; q_start int64 [B]: the query's position,
    which attends to itself and all before it. Scores, softmax and sums are fp32.
    """
    q, (b, heads, _) = q.contiguous(), q.shape
    out = q.new_empty(b, heads, layout.value)
    if not b:
        return out
    constants = tile_of(layout, heads)
    tiles = layout.heads * triton.cdiv(constants["SHARED"], constants["TILE"])
    splits, each = splits_of(b, tiles, key_slots.shape[1])
    partial = torch.empty(b, heads, splits, layout.value, dtype=torch.float32, device=q.device)
    sums = torch.empty(b, heads, splits, dtype=torch.float32, device=q.device)
    split_kernel[
        (tiles, b, splits)
    ](  # the tiles of a sequence side by side: what one reads, the cache has for the others
        q,
        cache,
        key_slots.contiguous(),
        q_start,
        partial,
        sums,
        key_slots.shape[1],
        cache.shape[1],
        each,
        scale,
        **constants,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    padded = triton.next_power_of_2(splits)
    join_kernel[(b * heads,)](
        partial, sums, out, splits, VALUE=layout.value, SPLITS=padded, PAD_VALUE=constants["PAD_VALUE"], num_warps=4
    )
    return out

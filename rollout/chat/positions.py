"""Where a turn is in a sample, and where characters of its text are in its tokens."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

from miles_like.types import Sample


def last_turn(sample: Sample) -> int:
    """The index of the first token of the policy's last turn, which the sample ends with."""
    masked = (~sample.loss_mask).nonzero()
    return int(masked[-1]) + 1 if len(masked) else 0


def same_until(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The length of the longest common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def tokens_of(decode: Callable[[Sequence[int]], str], ids: Sequence[int], start: int, end: int) -> tuple[int, int]:
    """The smallest stretch of `ids` whose text has the characters `start` to `end` of the whole text. A bisection:
    decodes about 2 log2(len(ids)) prefixes."""

    def length(k: int) -> int:
        return len(decode(ids[:k]))

    counts = range(len(ids) + 1)
    first = max(bisect.bisect_right(counts, start, key=length) - 1, 0)
    return first, max(bisect.bisect_left(counts, end, key=length), first)

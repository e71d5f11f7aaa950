"""How alike two texts are: the Jaccard index of their shingles, and all pairs at or above a threshold.

A shingle is three consecutive words. The pairs are exact, none is missed or drawn by chance: two sets whose Jaccard
index is at least t share one of the rarest n - ceil(t n) + 1 shingles of each, n being its size (prefix filtering:
Chaudhuri et al., ICDE 2006; Bayardo et al., WWW 2007), so only sets that share such a shingle are compared. MinHash
with locality-sensitive hashing estimates the same index and misses pairs near the threshold, which would then lie on
both sides of a split.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import regex

SHINGLE = 3  # words
THRESHOLD = 0.8

# scripts without spaces between words: a character is a word; signs of arithmetic are words too, for 1+2 is not 1-2
_ALONE = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_WORD = regex.compile(rf"[{_ALONE}]|[\w--[{_ALONE}]]+|[\p{{Sm}}\-*/^%]", regex.V1)

Shingles = frozenset[tuple[str, ...]]


class Pair(NamedTuple):
    """Two texts, by their numbers, and the Jaccard index of their shingles."""

    first: int
    second: int
    jaccard: float


def normalized(text: str) -> str:
    """The text without differences of case, white space and Unicode form. Texts with equal results are exact
    duplicates."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def shingles(text: str) -> Shingles:
    """Of a normalized text; of one with fewer than three words all of them together, of one without a word the text."""
    words = _WORD.findall(text) or [text]
    return frozenset(tuple(words[i : i + SHINGLE]) for i in range(max(len(words) - SHINGLE + 1, 1)))


def exact_threshold(threshold: float) -> Fraction:
    """Raises ValueError unless 0 < threshold <= 1."""
    if not 0 < threshold <= 1:
        raise ValueError(
            f"--threshold {threshold:g}: expected a Jaccard similarity above 0 and up to 1, for example {THRESHOLD:g}"
        )
    return Fraction(str(threshold))


def near_pairs(texts: Sequence[str], threshold: float) -> Iterator[Pair]:
    """Yields (i, j), i < j, for all texts whose shingles have a Jaccard index of at least `threshold`. Texts are
    normalized, and unique: many equal ones would make as many pairs as their square."""
    yield from _join(texts, None, threshold)


def pairs_with(texts: Sequence[str], others: Sequence[str], threshold: float) -> Iterator[Pair]:
    """Yields (number of a text, number of another) likewise."""
    yield from _join(texts, others, threshold)


def _join(texts: Sequence[str], others: Sequence[str] | None, threshold: float) -> Iterator[Pair]:
    """The pairs of texts with others, or with the texts before them."""
    t = exact_threshold(threshold)
    sets, of_others = [shingles(s) for s in texts], [shingles(s) for s in others or ()]
    count = Counter(s for one in (*sets, *of_others) for s in one)
    rank = {s: n for n, (s, _) in enumerate(sorted(count.items(), key=lambda item: item[1]))}  # rarest first
    held: list[Sequence[int]] = []
    index: defaultdict[int, list[int]] = defaultdict(list)  # shingle -> numbers of `held` with it in their prefix

    def hold(ranked: Sequence[int]) -> None:
        for s in _prefix(ranked, t):
            index[s].append(len(held))
        held.append(ranked)

    for one in of_others:
        hold(sorted(map(rank.__getitem__, one)))
    for i, one in enumerate(sets):
        ranked = sorted(map(rank.__getitem__, one))
        own = set(ranked)
        for j in sorted({j for s in _prefix(ranked, t) for j in index[s]}):
            other = held[j]
            shared = len(own.intersection(other))
            union = len(own) + len(other) - shared
            if shared * t.denominator >= t.numerator * union:
                yield Pair(j, i, shared / union) if others is None else Pair(i, j, shared / union)
        if others is None:
            hold(ranked)


def _prefix(ranked: Sequence[int], t: Fraction) -> Sequence[int]:
    return ranked[: len(ranked) - math.ceil(t * len(ranked)) + 1]


def clusters(n: int, pairs: Iterable[Pair]) -> list[int]:
    """For each of n texts the smallest number in its cluster: texts that a chain of pairs connects."""
    root = list(range(n))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for a, b, _ in pairs:
        low, high = sorted((find(a), find(b)))
        root[high] = low
    return [find(i) for i in range(n)]

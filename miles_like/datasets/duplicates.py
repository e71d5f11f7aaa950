"""Duplicate rows: prompts of the same text, or of nearly the same, with the same answer.

Prompts that differ in a number are nearly the same text and ask for another answer. They are variants of one problem,
not duplicates, and a row with the same prompt as another and another answer contradicts it. Neither is removed.
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from miles_like.datasets.similarity import Pair, near_pairs, normalized
from miles_like.datasets.table import Item
from miles_like.rewards.maths.answer_text import MARK, number_of


class Duplicate(NamedTuple):
    """A row that repeats an earlier one, which is kept."""

    item: int
    kept: int
    jaccard: float  # Jaccard index of the shingles of both prompts
    exact: bool  # the same text


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicates:
    removed: Sequence[Duplicate]  # in the order of the file
    kept: Sequence[int]
    contradictions: Sequence[tuple[int, ...]]  # rows of one text with several answers, the first of each answer
    variants: int  # pairs of nearly the same text with other answers

    @property
    def exact(self) -> int:
        return sum(d.exact for d in self.removed)


def answer_key(answer: str) -> str:
    """Equal for answers that mean the same: numbers by their value, other text without differences of case, white space
    and Unicode form; of GSM8K's solutions what follows the mark."""
    end = answer.rsplit(MARK, 1)[-1].strip()
    value = number_of(end)
    return str(value) if value is not None else " ".join(unicodedata.normalize("NFKC", end).casefold().split())


def find_duplicates(items: Sequence[Item], threshold: float) -> Duplicates:
    """Goes through the rows in the order of the file: a row is a duplicate if a row that was kept before has the same
    answer, and the same text or shingles with a Jaccard index of at least `threshold`. So no two kept rows are
    duplicates, and a row that is appended to the file changes nothing for those before it."""
    found = Texts(items)
    near = found.neighbours(near_pairs(found.texts, threshold))
    answers = [answer_key(i.prompt.answer) for i in items]
    kept_of: dict[tuple[int, str], tuple[int, float]] = {}  # (text, answer) -> the kept row, and how like it is
    own: dict[tuple[int, str], int] = {}  # those whose text is that of the kept row
    removed, kept = list[Duplicate](), list[int]()
    for i, (text, answer) in enumerate(zip(found.of, answers, strict=True)):
        key = (text, answer)
        if key in kept_of:
            removed.append(Duplicate(i, *kept_of[key], key in own))
            continue
        before = [(own[other, answer], index) for other, index in near.get(text, ()) if (other, answer) in own]
        if before:
            kept_of[key] = min(before)
            removed.append(Duplicate(i, *kept_of[key], False))
        else:
            kept_of[key], own[key] = (i, 1.0), i
            kept.append(i)
    firsts: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for i, (text, answer) in enumerate(zip(found.of, answers, strict=True)):
        firsts[text].setdefault(answer, i)
    return Duplicates(
        removed=removed,
        kept=kept,
        contradictions=[tuple(of.values()) for of in firsts.values() if len(of) > 1],
        variants=sum(firsts[a].keys() != firsts[b].keys() for a, of in near.items() for b, _ in of if a < b),
    )


class Texts:
    """The unique normalized prompts of rows. texts: in the order of the file; of: the text of each row."""

    def __init__(self, items: Sequence[Item]) -> None:
        numbers: dict[str, int] = {}
        self.of = [numbers.setdefault(normalized(i.asked), len(numbers)) for i in items]
        self.texts = list(numbers)

    def neighbours(self, pairs: Iterator[Pair]) -> dict[int, list[tuple[int, float]]]:
        """Text -> (a text of a pair with it, their Jaccard index)."""
        out: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        for a, b, index in pairs:
            out[a].append((b, index))
            out[b].append((a, index))
        return dict(out)

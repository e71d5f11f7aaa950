"""Rows of a file that are in an eval set too, as they are, nearly, or in a passage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from miles_like.datasets.similarity import normalized, pairs_with
from miles_like.datasets.table import Table
from rollout.prompts.contamination import WORDS, overlaps

How = Literal["exact", "near", "passage"]


class Leak(NamedTuple):
    """A row, and the first row of an eval set that it matches."""

    item: int
    held: str  # file and place
    how: How
    jaccard: float  # Jaccard index of the shingles; 0 of a passage, where it was not computed

    def __str__(self) -> str:
        words = {
            "exact": "the prompt equals that of",
            "near": f"the prompt is a near-duplicate (similarity {self.jaccard:.2f}) of",
            "passage": f"the prompt shares {WORDS} consecutive words with",
        }
        return f"{words[self.how]} {self.held}"


def find_leaks(table: Table, held: Mapping[str, Table], threshold: float) -> list[Leak]:
    """In the order of the rows; name -> rows of each eval set. A row that matches in several ways has the first of
    exact, near, passage."""
    where = [(t, i) for t in held.values() for i in range(len(t.items))]
    of_text: dict[str, str] = {}
    for t, i in where:
        of_text.setdefault(normalized(t.items[i].asked), t.where(i))
    texts = [normalized(i.asked) for i in table.items]
    found = {i: Leak(i, of_text[text], "exact", 1.0) for i, text in enumerate(texts) if text in of_text}
    rest = [i for i in range(len(texts)) if i not in found]
    others = list(of_text)
    for n, j, jaccard in pairs_with([texts[i] for i in rest], others, threshold):
        i, leak = rest[n], found.get(rest[n])
        if leak is None or jaccard > leak.jaccard:
            found[i] = Leak(i, of_text[others[j]], "near", jaccard)
    _add_passages(table, held, found)
    return [found[i] for i in sorted(found)]


def _add_passages(table: Table, held: Mapping[str, Table], found: dict[int, Leak]) -> None:
    numbers = {i.prompt.id: n for n, i in enumerate(table.items)}
    places = {(name, i.prompt.id): t.where(n) for name, t in held.items() for n, i in enumerate(t.items)}
    prompts = {name: [i.prompt for i in t.items] for name, t in held.items()}
    for o in overlaps([i.prompt for i in table.items], prompts):
        n = numbers[o.prompt.id]
        found.setdefault(n, Leak(n, places[o.eval_set, o.held.id], "passage", 0.0))


def leak_counts(leaks: Sequence[Leak]) -> dict[How, int]:
    ways: tuple[How, ...] = ("exact", "near", "passage")
    return {how: sum(leak.how == how for leak in leaks) for how in ways}

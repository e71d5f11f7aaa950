"""Strategies of prompts that are nearly alike: few texts, each with a few words changed."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

from miles_like.datasets.table import Item
from miles_like.types import Prompt

NEAR = Fraction(4, 5)
_LONG = [f"a{n}" for n in range(30)]
_SHORT = ["b c d e", "b c d", "f", "b + c", "b - c"]


@st.composite
def similar_texts(draw: st.DrawFn) -> str:
    """Mostly one text of 30 words with up to two changed. The Jaccard index of the shingles of two such texts is 25/31
    with one word changed, 27/29 if it is the first or last, and below 0.8 with several, so clusters are chains."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(_SHORT))
    words = list(_LONG)
    for place, word in draw(st.lists(st.tuples(st.sampled_from([0, 9, 19, 29]), st.sampled_from("xyz")), max_size=2)):
        words[place] = word
    return " ".join(words)


def items_of(texts: Sequence[str], answers: Sequence[str] | None = None) -> list[Item]:
    """Rows of a file with these prompts, on lines 1, 2, ..."""
    given = answers or [""] * len(texts)
    return [
        Item(
            row={"prompt": text, "answer": answer},
            place=f"line {n}",
            prompt=Prompt(id=f"r{n}", token_ids=(1,), answer=answer, text=text),
            asked=text,
        )
        for n, (text, answer) in enumerate(zip(texts, given, strict=True), 1)
    ]


def jaccard(a: frozenset[Any], b: frozenset[Any]) -> Fraction:
    return Fraction(len(a & b), len(a | b))

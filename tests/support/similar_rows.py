"""Strategies of prompts that are nearly alike: few texts, each with a few words changed."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from miles_like.datasets.table import Item
from miles_like.types import Prompt

_BASES = [" ".join(f"{letter}{n}" for n in range(length)) for letter, length in (("a", 30), ("b", 14), ("c", 4))]


@st.composite
def similar_texts(draw: st.DrawFn) -> str:
    """Of 2 to 30 words. One changed word leaves a Jaccard index of 25/31 to 27/29 of 30 words, and less of fewer."""
    words = draw(st.sampled_from(_BASES)).split()
    for place, word in draw(st.lists(st.tuples(st.integers(0, 29), st.sampled_from("xyz")), max_size=3)):
        words[place % len(words)] = word
    return " ".join(words[: draw(st.integers(2, 30))])


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


def jaccard(a: frozenset[object], b: frozenset[object]) -> float:
    return len(a & b) / len(a | b)

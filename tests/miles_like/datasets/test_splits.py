"""A split that holds while a file grows: rows keep their part, and similar prompts are never in two parts.

Why it must hold: a row that moves from train to heldout was trained on before it is measured, and a near duplicate on
the other side is measured as if it were learnt. Not covered: paraphrases.
"""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.datasets.similarity import normalized, shingles
from miles_like.datasets.split import Split, parse_parts, part_of, split
from tests.support.refusals import refuses
from tests.support.similar_rows import NEAR, items_of, jaccard, similar_texts

PARTS = parse_parts("train=0.5,valid=0.2,heldout=0.3")
TEXTS = st.lists(similar_texts(), max_size=9)


def of_text(found: Split, texts: list[str]) -> dict[str, str]:
    """Text -> its part; left-out texts are missing. Equal texts are in one part."""
    out: dict[str, str] = {}
    for name, rows in found.parts.items():
        for i in rows:
            assert out.setdefault(texts[i], name) == name
    return out


def divided(texts: list[str], seed: int) -> Split:
    return split(items_of(texts), PARTS, threshold=0.8, seed=seed)


@settings(max_examples=50, deadline=None)
@given(texts=TEXTS, more=TEXTS, seed=st.integers(0, 20), order=st.randoms(use_true_random=False))
def test_rows_that_are_added_move_no_row(texts: list[str], more: list[str], seed: int, order: random.Random) -> None:
    """Wherever they are added. A row may be left out for a new one that is nearly its text in a smaller part."""
    before = of_text(divided(texts, seed), texts)
    grown = [*texts, *more]
    order.shuffle(grown)
    after = of_text(divided(grown, seed), grown)
    assert all(after.get(text, part) == part for text, part in before.items())
    assert all(text not in after for text in set(texts) - before.keys())  # what is left out stays out


@settings(max_examples=50, deadline=None)
@given(texts=TEXTS, seed=st.integers(0, 20))
def test_similar_prompts_are_never_in_two_parts(texts: list[str], seed: int) -> None:
    found = divided(texts, seed)
    part = of_text(found, texts)
    for a in part:
        for b in part:
            assert part[a] == part[b] or jaccard(shingles(a), shingles(b)) < NEAR
    rows = sorted([*found.left_out, *(i for of in found.parts.values() for i in of)])
    assert rows == list(range(len(texts)))  # each row once
    if not found.crossing:
        assert not found.left_out


def test_the_smallest_part_keeps_its_rows() -> None:
    """Held-out rows are few."""
    base = " ".join(f"w{n}" for n in range(40))
    texts = [f"{base} {end}" for end in range(40)]
    homes = {part_of(normalized(t), PARTS, 0) for t in texts}
    found = divided(texts, 0)
    assert homes == set(PARTS) and found.crossing == 1
    assert not found.parts["train"] and not found.parts["heldout"]
    assert sorted([*found.parts["valid"], *found.left_out]) == list(range(40))
    assert all(part_of(normalized(texts[i]), PARTS, 0) == "valid" for i in found.parts["valid"])


def test_shares_are_those_of_the_prompts() -> None:
    """Within four standard deviations of 4,000 draws; and another seed is another split."""
    texts = [f"question {n} of many {n * n}" for n in range(4000)]
    counts = Counter(part_of(t, PARTS, 0) for t in texts)
    assert all(abs(counts[name] / 4000 - float(p)) < 4 * (0.25 / 4000) ** 0.5 for name, p in PARTS.items())
    assert 0.5 < sum(part_of(t, PARTS, 0) != part_of(t, PARTS, 1) for t in texts) / 4000 < 0.75
    assert part_of("1+2=", PARTS, 0) == "heldout"  # the same on every machine and in every version


def test_parts_that_are_none() -> None:
    for wrong in ("train=0.9", "train=0.9,heldout=0.2", "train=1,heldout=0", "a=0.5,a=0.5", "left_out=0.5,b=0.5", "x"):
        with refuses(ValueError, "--parts", wrong):
            parse_parts(wrong)

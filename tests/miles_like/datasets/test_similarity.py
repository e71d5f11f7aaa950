"""All pairs of similar texts are found, and no others. Not covered: paraphrases and translations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.datasets.similarity import clusters, exact_threshold, near_pairs, normalized, pairs_with, shingles
from tests.support.refusals import refuses
from tests.support.similar_rows import NEAR, jaccard, similar_texts

TEXTS = st.lists(similar_texts(), max_size=9, unique=True)
THRESHOLDS = st.sampled_from([0.1, 0.5, 0.8, 25 / 31, 1.0])


@settings(max_examples=50, deadline=None)
@given(texts=TEXTS, others=TEXTS, threshold=THRESHOLDS)
def test_against_a_comparison_of_each_with_each(texts: list[str], others: list[str], threshold: float) -> None:
    """Why it must hold: a pair that is missed may end in the training part and in the held-out one."""
    near = exact_threshold(threshold)
    sets, of_others = [shingles(t) for t in texts], [shingles(t) for t in others]
    wanted = {(i, j) for j, b in enumerate(sets) for i, a in enumerate(sets[:j]) if jaccard(a, b) >= near}
    found = list(near_pairs(texts, threshold))
    assert {(i, j) for i, j, _ in found} == wanted and len(found) == len(wanted)
    assert all(index == float(jaccard(sets[i], sets[j])) for i, j, index in found)
    across = {(i, j) for i, a in enumerate(sets) for j, b in enumerate(of_others) if jaccard(a, b) >= near}
    assert {(i, j) for i, j, _ in pairs_with(texts, others, threshold)} == across


@settings(max_examples=30, deadline=None)
@given(texts=TEXTS)
def test_a_cluster_is_what_a_chain_of_pairs_connects(texts: list[str]) -> None:
    pairs = list(near_pairs(texts, 0.8))
    roots = clusters(len(texts), pairs)
    assert all(roots[i] == roots[j] for i, j, _ in pairs)
    for start in range(len(texts)):
        reached, todo = {start}, [start]
        while todo:
            now = todo.pop()
            new = {b for a, b, _ in pairs if a == now} | {a for a, b, _ in pairs if b == now}
            todo += new - reached
            reached |= new
        assert {i for i, root in enumerate(roots) if root == roots[start]} == reached
        assert roots[start] == min(reached)


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        ("How many   APPLES?", "how many apples", True),  # punctuation is no word
        ("1+2=", "1-2=", False),
        (
            "小明有三个苹果小红给了他五个苹果现在一共有多少个苹果呢",
            "小明有三个苹果小红给了他五个苹果现在一共有多少个苹果",
            True,
        ),
        ("!?", "?!", False),
    ],
)
def test_what_counts_as_a_word(first: str, second: str, alike: bool) -> None:
    a, b = (shingles(normalized(text)) for text in (first, second))
    assert (jaccard(a, b) >= NEAR) is alike


def test_a_threshold_is_a_share() -> None:
    for wrong in (0, 1.5, -1):
        with refuses(ValueError, "--threshold", wrong):
            exact_threshold(wrong)

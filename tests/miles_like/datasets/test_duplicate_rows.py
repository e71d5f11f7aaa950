"""Which rows repeat an earlier one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.datasets.duplicates import answer_key, find_duplicates
from miles_like.datasets.similarity import shingles
from tests.support.similar_rows import NEAR, items_of, jaccard, similar_texts

ROWS = st.lists(st.tuples(similar_texts(), st.sampled_from(["3", "3.0", "four"])), max_size=9)


@settings(max_examples=50, deadline=None)
@given(rows=ROWS, more=ROWS)
def test_what_is_kept_repeats_nothing_and_what_is_removed_does(
    rows: list[tuple[str, str]], more: list[tuple[str, str]]
) -> None:
    """And rows that are appended change nothing for those before them."""
    items = items_of([t for t, _ in rows], [a for _, a in rows])
    found = find_duplicates(items, 0.8)
    sets, keys = [shingles(t) for t, _ in rows], [answer_key(a) for _, a in rows]

    def repeats(i: int, j: int) -> bool:
        return keys[i] == keys[j] and jaccard(sets[i], sets[j]) >= NEAR

    assert not [(i, j) for i in found.kept for j in found.kept if i < j and repeats(i, j)]
    assert all(d.kept in found.kept and d.kept < d.item and repeats(d.item, d.kept) for d in found.removed)
    assert all(d.jaccard == float(jaccard(sets[d.item], sets[d.kept])) for d in found.removed)
    assert all(d.exact is (rows[d.item][0] == rows[d.kept][0]) for d in found.removed)
    assert sorted([*found.kept, *(d.item for d in found.removed)]) == list(range(len(rows)))
    grown = [*rows, *more]
    later = find_duplicates(items_of([t for t, _ in grown], [a for _, a in grown]), 0.8)
    assert [i for i in later.kept if i < len(rows)] == list(found.kept)


def test_another_answer_is_no_duplicate() -> None:
    """A number that differs makes a variant of the problem, and the same prompt with two answers a contradiction."""
    base = "a train leaves the station at noon and goes at {} miles an hour for three hours , how far does it go then ?"
    texts = [base.format(50), base.format(60), base.format(50), base.format(50)]
    found = find_duplicates(items_of(texts, ["150", "180", "so it is\n#### 150", "160"]), 0.7)
    assert list(found.kept) == [0, 1, 3]
    assert [(d.item, d.kept, d.exact) for d in found.removed] == [(2, 0, True)]
    assert found.contradictions == [(0, 3)] and found.variants == 1


def test_answers_that_mean_the_same() -> None:
    same = ["72", "72.0", " so\n#### 72", "$72", "7.2e1"]
    assert len({answer_key(a) for a in same}) == 1
    assert answer_key("Paris ") == answer_key("PARIS") != answer_key("Rome")

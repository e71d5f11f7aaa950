"""The ledger refuses whatever would train a sample twice or lose one, and its file says the same as its counts.

A loop that trains a sample twice, or drops those that are slow, gives curves that look like any others, so nothing else
would tell. Not covered: that the loop tells its ledger of every sample (the law of the killed runs).
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.checkpoint.ledger import Ledger
from miles_like.checkpoint.ledger_audit import audit
from tests.support.made_samples import group, sample
from tests.support.refusals import Facts, refuses


def of(prompt, indices, **discarded):
    made = group([sample(prompt, i) for i in indices] or [sample(prompt, 0)])
    return dataclasses.replace(made, samples=made.samples if indices else (), discarded=discarded)


def test_the_file_of_two_steps_by_hand(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for ticket, prompt in enumerate("abcd"):
        ledger.issue(ticket, prompt, 4)
    ledger.discard(1, "stale", discarded_samples={"no reward": 1})
    ledger.train(1, 0, of("a", [0, 3, 1], cut=1))
    ledger.check([2, 3])
    ledger.flush(1)
    ledger.train(2, 2, of("c", [2, 1, 0, 3]))
    ledger.flush(2)
    assert [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()] == [
        {"step": 1, "ticket": 0, "prompt": "a", "trained": [0, 1, 3], "discarded": {"cut": 1}},
        {"step": 1, "ticket": 1, "prompt": "b", "trained": [], "discarded": {"no reward": 1, "stale": 3}},
        {"step": 1, "tickets": 4, "issued": 16, "trained": 3, "discarded": 5, "in_flight": 8},
        {"step": 2, "ticket": 2, "prompt": "c", "trained": [0, 1, 2, 3], "discarded": {}},
        {"step": 2, "tickets": 4, "issued": 16, "trained": 7, "discarded": 5, "in_flight": 4},
    ]
    assert ledger.metrics() == {
        "ledger/issued": 16.0,
        "ledger/trained": 7.0,
        "ledger/discarded": 5.0,
        "ledger/in_flight": 4.0,
    }
    balance = "Samples: 16 generated, 7 trained, 5 discarded (3 stale, 1 no reward, 1 cut), 4 in flight"
    assert ledger.close() == balance


def of_rows(prompt, rows):
    """rows: (index, row)"""
    return group([dataclasses.replace(sample(prompt, i), row=row) for i, row in rows])


def test_an_episode_of_several_rows_is_one_sample_and_its_rows_are_counted(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.issue(0, "a", 2)
    ledger.train(1, 0, of_rows("a", [(0, 0), (1, 0), (1, 1), (1, 2)]))
    ledger.flush(1)
    first, totals = (json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines())
    assert first == {"step": 1, "ticket": 0, "prompt": "a", "trained": [0, 1], "discarded": {}, "rows": {"1": 3}}
    assert totals == {"step": 1, "tickets": 1, "issued": 2, "trained": 2, "discarded": 0, "in_flight": 0}
    assert audit(tmp_path / "ledger.jsonl").wrong is None


REFUSED = [
    ((1, "b"), lambda it: it.issue(1, "b", 2)),
    ((4, "b", 2), lambda it: it.issue(4, "b", 2)),
    ((2, "b", 0), lambda it: it.issue(2, "b", 0)),
    ((0,), lambda it: it.train(1, 0, of("a", [0, 1]))),
    ((0,), lambda it: it.discard(0, "stale")),
    ((2,), lambda it: it.discard(2, "stale")),
    ((-1,), lambda it: it.train(1, -1, of("a", [0, 1]))),
    (("b", "a"), lambda it: it.train(1, 1, of("a", [0, 1]))),
    ((1, "b"), lambda it: it.train(1, 1, of("b", [1, 1]))),
    ((2, 0, 1), lambda it: it.train(1, 1, of("b", [0, 2]))),
    ((2, 1, 0), lambda it: it.train(1, 1, of("b", [0]))),
    ((2, 2, 1), lambda it: it.train(1, 1, of("b", [0, 1], cut=1))),
    ((1, 1), lambda it: it.train(1, 1, of("b", [0], cut=2, late=-1))),
    ((2, "cut", 3), lambda it: it.discard(1, "stale", discarded_samples={"cut": 3})),
    ((1,), lambda it: it.check([])),
    ((0,), lambda it: it.check([0, 1])),
    ((1, "b", 1, 1), lambda it: it.train(1, 1, of_rows("b", [(0, 0), (1, 0), (1, 1), (1, 1)]))),
    ((1, "b", "[0, 2]", 1), lambda it: it.train(1, 1, of_rows("b", [(0, 0), (1, 0), (1, 2)]))),
    ((1, "b", "[1]", 0), lambda it: it.train(1, 1, of_rows("b", [(0, 1), (1, 0)]))),
]


@pytest.mark.parametrize(("facts", "change"), REFUSED)
def test_what_does_not_fit_is_named_and_changes_nothing(facts: Facts, change):
    ledger = Ledger(None)
    ledger.issue(0, "a", 2)
    ledger.issue(1, "b", 2)
    ledger.discard(0, "stale")
    ledger.flush(0)
    before = ledger.state()
    with refuses(RuntimeError, "ledger", *facts):
        change(ledger)
    assert ledger.state() == before
    ledger.check([1])


def test_a_sample_of_another_prompt_within_the_group_is_refused():
    ledger = Ledger(None)
    ledger.issue(0, "a", 2)
    mixed = dataclasses.replace(of("a", [0, 1]), samples=(sample("a", 0), sample("other", 1)))
    with refuses(RuntimeError, "other"):
        ledger.train(1, 0, mixed)


def test_a_restored_ledger_goes_on_as_if_it_had_not_ended(tmp_path):
    whole, first = Ledger(tmp_path / "whole"), Ledger(tmp_path / "cut")

    def begin(ledger):
        for ticket in range(3):
            ledger.issue(ticket, "a", 2)
        ledger.discard(1, "stale")
        ledger.flush(1)

    def go_on(ledger):
        ledger.train(2, 0, of("a", [0, 1]))
        ledger.issue(3, "a", 2)
        ledger.flush(2)
        return ledger.close()

    begin(whole)
    begin(first)
    saved = json.loads(json.dumps(first.state()))
    first.close()
    second = Ledger(tmp_path / "cut")
    second.restore(saved)
    second.check([0, 2])
    assert go_on(second) == go_on(whole)
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(
    ("damage", "facts"),
    [
        ({"issued": 5}, (2, 5, 0, 2, 2, 2)),
        ({"open": [[7, "b", 2]]}, (2, 4, 0)),
        ({"open": [[1, "b"]]}, ("ValueError",)),
        ({"discarded": None}, ("AttributeError",)),
    ],
)
def test_a_damaged_state_is_named(damage, facts: Facts):
    ledger = Ledger(None)
    ledger.issue(0, "a", 2)
    ledger.issue(1, "b", 2)
    ledger.discard(0, "stale")
    ledger.flush(1)
    with refuses(ValueError, *facts):
        Ledger(None).restore({**ledger.state(), **damage})


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("issue"), st.integers(0, 6), st.sampled_from("ab"), st.integers(0, 3)),
        st.tuples(st.just("discard"), st.integers(-1, 6)),
        st.tuples(
            st.just("train"),
            st.integers(-1, 6),
            st.sampled_from("ab"),
            st.lists(st.integers(0, 3), max_size=4),
            st.integers(0, 2),
        ),
        st.tuples(st.just("restart")),
    ),
    max_size=30,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(EVENTS)
def test_any_sequence_of_events_against_a_model(tmp_path_factory, events):
    """The model knows each sample's fate by its name; what would give one a second fate, or none, is illegal."""
    fates, prompts = {}, {}  # (ticket, index) -> None in flight | "trained" | "discarded"; ticket -> prompt
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    ledger = Ledger(path)
    for step, (kind, *how) in enumerate(events):
        of_ticket = [s for s in fates if how and s[0] == how[0] and fates[s] is None]
        if kind == "issue":
            legal = how[0] == len(prompts) and how[2] > 0
            changes = {(how[0], i): None for i in range(how[2])}
            call = partial(ledger.issue, *how)
        elif kind == "discard":
            legal, changes = bool(of_ticket), dict.fromkeys(of_ticket, "discarded")
            call = partial(ledger.discard, how[0], "stale")
        elif kind == "train":
            ticket, prompt, indices, discarded_samples = how
            named = {(ticket, i) for i in indices}
            legal = bool(of_ticket) and prompts[ticket] == prompt and len(named) == len(indices)
            legal = legal and named <= set(of_ticket) and len(indices) + discarded_samples == len(of_ticket)
            changes = {s: "trained" if s in named else "discarded" for s in of_ticket}
            group_ = of(prompt, indices, **({"cut": discarded_samples} if discarded_samples else {}))
            call = partial(ledger.train, step, ticket, group_)
        else:
            legal, changes = True, {}
            saved = ledger.state()
            ledger.close()
            ledger = Ledger(path)
            call = partial(ledger.restore, saved)
        before = ledger.state()
        if legal:
            call()
            fates |= changes
            if kind == "issue":
                prompts[how[0]] = how[1]
        else:
            with pytest.raises(RuntimeError):
                call()
            assert ledger.state() == before
        ledger.check({t for (t, _), fate in fates.items() if fate is None})
        ledger.flush(step)
        counts = [sum(f == fate for f in fates.values()) for fate in ("trained", "discarded", None)]
        assert list(ledger.metrics().values()) == [len(fates), *counts]
    ledger.close()
    written = [json.loads(line) for line in path.read_text().splitlines()]
    closed = [row for row in written if "ticket" in row]
    assert {(r["ticket"], i) for r in closed for i in r["trained"]} == {s for s, f in fates.items() if f == "trained"}
    assert sum(sum(r["discarded"].values()) for r in closed) == sum(f == "discarded" for f in fates.values())


def test_every_figure_is_documented():
    documented = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    assert [key for key in Ledger(None).metrics() if f"`{key}`" not in documented] == []

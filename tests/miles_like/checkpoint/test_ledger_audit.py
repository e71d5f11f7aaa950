"""A ledger file that was damaged, or that does not account for every sample, is named by its first wrong line.

A resumed run, and a report of a run, have only this file. Not covered: a file that was changed so that all its counts
fit again; the digest in a checkpoint detects that.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.checkpoint.ledger import Ledger
from miles_like.checkpoint.ledger_audit import audit
from tests.support.refusals import Facts, refuses

LINES = [
    {"step": 1, "ticket": 0, "prompt": "a", "trained": [0, 1, 3], "discarded": {"cut": 1}},
    {"step": 1, "ticket": 1, "prompt": "b", "trained": [], "discarded": {"late": 1, "stale": 3}},
    {"step": 1, "tickets": 4, "issued": 16, "trained": 3, "discarded": 5, "in_flight": 8},
    {"step": 2, "ticket": 2, "prompt": "c", "trained": [0, 1, 2, 3], "discarded": {}},
    {"step": 2, "ticket": 3, "prompt": "d", "trained": [0, 1, 2, 3], "discarded": {}},
    {"step": 2, "tickets": 5, "issued": 20, "trained": 11, "discarded": 5, "in_flight": 4},
]


def write(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_sound_file(tmp_path):
    found = audit(write(tmp_path / "ledger.jsonl", LINES))
    assert (found.wrong, found.unfinished) == (None, 0)
    assert dict(found.reasons) == {"stale": 3, "cut": 1, "late": 1}
    assert [(t.step, t.issued, t.in_flight) for t in found.steps] == [(1, 16, 8), (2, 20, 4)]
    assert audit(write(tmp_path / "none", [])).steps == ()


def test_what_a_kill_leaves_is_no_fault(tmp_path):
    path = write(tmp_path / "ledger.jsonl", LINES[:-1])
    with path.open("a") as out:
        out.write('{"step":2,"tick')
    found = audit(path)
    assert (found.wrong, found.unfinished, len(found.steps)) == (None, 3, 1)
    assert dict(found.reasons) == {"stale": 3, "cut": 1, "late": 1}


DAMAGE = [
    (2, '{"step":1,', (3,)),
    (0, "\x00\x00", (1,)),
    (1, "7", (2, "int")),
    (1, {"ticket": 1}, (2, "ticket")),
    (2, LINES[2] | {"issued": 16.5}, (3, "in_flight")),
    (1, LINES[1] | {"ticket": -1}, (2, 1, -1, "b")),
    (0, LINES[0] | {"trained": [0, 1, 1]}, (1, 0, "[0, 1, 1]")),
    (0, LINES[0] | {"trained": [0, 3, 1]}, (1, 0, "[0, 3, 1]")),
    (0, LINES[0] | {"discarded": {"cut": 0}}, (1, 0, "cut", 0, 1)),
    (0, LINES[0] | {"discarded": {}}, (1, 0, 3, "[0, 1, 3]")),
    (1, LINES[1] | {"discarded": {}}, (2, 1, 0)),
    (1, LINES[1] | {"ticket": 0}, (2, 0)),
    (4, LINES[4] | {"ticket": 1}, (5, 1)),
    (4, LINES[4] | {"step": 3}, (5, 3, 3, 2)),
    (3, LINES[3] | {"step": 1}, (4, 2, 1, 1)),
    (3, LINES[3] | {"ticket": 9}, (5, 3, 9)),
    (2, LINES[2] | {"step": 2}, (3, 2, 1)),
    (2, LINES[2] | {"trained": 4, "in_flight": 7}, (3, 1, 4, 3)),
    (1, LINES[1] | {"discarded": {"late": 4, "stale": 3}}, (3, 1, 5, 8)),
    (2, LINES[2] | {"in_flight": 9}, (3, 1, 16, 3, 5, 9)),
    (5, LINES[5] | {"tickets": 4}, (6, 2, 4, 0, 4, 4)),
    (5, LINES[5] | {"tickets": 9}, (6, 2, 4, 5)),
    (4, LINES[4] | {"ticket": 8}, (6, 2, 5, 8)),
    (5, LINES[2] | {"step": 2}, (6, 2, 3)),
    (
        2,
        LINES[2] | {"tickets": 9, "issued": 21, "in_flight": 13},
        (6, 2, 5, 20, 9, 21),
    ),
    (0, LINES[0] | {"rows": {"2": 2}}, (1, 0, "{'2': 2}")),
    (0, LINES[0] | {"rows": {"1": 1}}, (1, 0, "{'1': 1}", 2)),
]


@pytest.mark.parametrize(("number", "line", "facts"), DAMAGE)
def test_the_first_wrong_line_is_named(tmp_path, number, line, facts: Facts):
    path = write(tmp_path / "ledger.jsonl", [*LINES[:number], line, *LINES[number + 1 :]])
    with refuses(AssertionError, "ledger.jsonl", *facts):
        raise AssertionError(audit(path).wrong)


def run(path):
    ledger = Ledger(path)
    for ticket in range(6):
        ledger.issue(ticket, "p", 1)
    for step in (1, 2):
        ledger.discard(2 * step, "stale")
        ledger.discard(2 * step - 1, "late")
        ledger.flush(step)
    return ledger


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_line_can_be_lost_doubled_or_moved(tmp_path_factory, data):
    """Any line of a whole step that is missing, there twice, or elsewhere. Only the end of a file may look so."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    run(path).close()
    lines = path.read_text().splitlines(keepends=True)
    at, to = (data.draw(st.integers(0, len(lines) - 2)) for _ in range(2))
    how = data.draw(st.sampled_from(["lost", "doubled", "moved"]))
    others = [*lines[:at], *lines[at + 1 :]]
    changed = {"lost": others, "doubled": [*lines[:at], lines[at], *lines[at:]], "moved": [*others[:to], lines[at]]}[
        how
    ]
    changed += others[to:] if how == "moved" else []
    path.write_text("".join(changed))
    assert (audit(path).wrong is None) == (changed == lines)


def test_a_damaged_file_is_named_where_a_run_resumes(tmp_path):
    path = tmp_path / "ledger.jsonl"
    saved = run(path).state()
    Ledger(path).restore(saved)
    text = path.read_text()
    for damaged, facts in {
        text.replace('"late":1', '"late":2', 1): (3, 1, 2, 3),
        text[: text.index('{"step":2')]: ("(6, 0, 2, 4)", "(6, 0, 4, 2)"),
        text + text.splitlines()[0].replace('"step":1', '"step":3').replace('"ticket":1', '"ticket":5') + "\n": (
            (1, "ledger.jsonl", "(6, 0, 4, 2)")
        ),
    }.items():
        path.write_text(damaged)
        with refuses(ValueError, *facts):
            Ledger(path).restore(saved)

"""The fault matrix has every role at every moment with both signals and every two values of two factors, says of each
cell what must happen, and docs/reliability.md is what its results say. Not covered here: the faults themselves."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults import page, points, record
from tests.faults.cells import (
    KINDS,
    MOMENTS,
    OUTCOMES,
    ROLES,
    RULES,
    SIGNALS,
    Cell,
    cells,
    left_out,
    must,
    why_impossible,
)
from tests.faults.throttle import main as throttle


def test_every_role_is_struck_at_every_moment_by_both_signals() -> None:
    names = {cell.name for cell in cells()}
    assert {f"{role} / {moment} / {signal}" for role in ROLES for moment in MOMENTS for signal in SIGNALS} <= names
    assert len(names) == len(cells()) >= 150
    assert all(Cell.named(name).name == name for name in names)


def test_any_two_of_role_moment_and_kind_meet_where_a_cell_may_hold_both() -> None:
    possible = [
        (role, moment, kind)
        for role in ROLES
        for moment in MOMENTS
        for kind in KINDS
        if kind not in SIGNALS and not why_impossible(role, moment, kind)
    ]
    played = [(c.role, c.moment, c.kind) for c in cells() if c.kind not in SIGNALS]
    assert set(played) <= set(possible) and len(played) < len(possible) / 2
    for i, j in itertools.combinations(range(3), 2):
        assert {(p[i], p[j]) for p in possible} == {(p[i], p[j]) for p in played}
    out = list(left_out())
    assert all(why for *_, why in out) and ("driver", "bit flip", "it serves no weights") in out


def test_each_cell_has_one_expectation_and_no_rule_is_idle() -> None:
    """The last rule that fits a role fits all of its cells, so that none is without."""
    used = {next(i for i, rule in enumerate(RULES) if rule.fits(cell)) for cell in cells()}
    assert used == set(range(len(RULES)))
    assert all(must(cell).outcome in OUTCOMES for cell in cells())


def result(**changes: Any) -> dict[str, Any]:
    good = {
        "cell": "rank / mid-step / SIGKILL",
        "did": "goes on",
        "replaced": ["ranks"],
        "sentence": "",
        "seconds": 3.0,
        "ledger": "closed",
        "differs": [],
        "struck": True,
        "commit": "abc1234",
        "date": "2026-01-01",
    }
    return good | changes


@pytest.mark.parametrize(
    ("changes", "phrases"),
    [
        ({}, []),
        ({"struck": False}, ["the fault did not strike at its moment"]),
        ({"did": "ends"}, ["it ends"]),
        ({"replaced": []}, ["nothing was replaced in place of ranks"]),
        ({"replaced": ["ranks", "server"]}, ["ranks, server was replaced in place of ranks"]),
        ({"cell": "rank / idle / garbage", "did": "ends"}, ["no sentence was printed"]),
        ({"cell": "rank / idle / garbage", "did": "ends", "sentence": "a loss is NaN"}, []),
        ({"ledger": "line 3: a group is trained twice"}, ["ledger: line 3: a group is trained twice"]),
        ({"differs": ["weights"]}, ["not bitwise: weights"]),
        ({"broken": "it hung"}, ["the cell was not played to its end: it hung"]),
    ],
)
def test_what_is_not_as_it_must_be_is_named(changes: dict[str, Any], phrases: list[str]) -> None:
    assert record.faults_of(result(**changes)) == phrases


def test_a_witness_is_believed_only_of_its_moment() -> None:
    half = {"cell": "rank / mid-step / SIGKILL", "seen": {"masters_moved": 5, "models_moved": 0}}
    assert points.believed(half)
    assert not points.believed(half | {"seen": {"masters_moved": 5, "models_moved": 5}})
    save = {"cell": "driver / mid-save / SIGSTOP", "seen": {"whole": False, "files": ["__0_0.distcp"]}}
    assert points.believed(save) and not points.believed(save | {"seen": {"whole": True, "files": ["__0_0.distcp"]}})
    first = {"cell": "teacher / idle / slow", "seen": {"first": 0}}
    assert points.believed(first) and not points.believed(first | {"seen": {"first": 2}})


def test_a_result_replaces_the_line_of_its_cell_and_a_cell_without_one_is_due(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    for kept in (result(), result(cell="driver / idle / SIGKILL", did="is restarted"), result(commit="def5678")):
        record.keep(kept, file)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["cell"], line["commit"]) for line in lines] == [
        ("driver / idle / SIGKILL", "abc1234"),
        ("rank / mid-step / SIGKILL", "def5678"),
    ]
    due = record.due(cells(), "def5678", record.read(file))
    assert len(due) == len(cells()) - 1 and due[-1].name == "driver / idle / SIGKILL"


def test_the_page_is_what_the_results_say() -> None:
    """python -m tests.faults.page writes it."""
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.renewed(text) == text
    assert set(record.read()) == {json.loads(line)["cell"] for line in record.RESULTS.read_text().splitlines()}
    wrong = page.section({"rank / mid-step / SIGKILL": result(differs=["weights"], sentence="a rank died")}, [])
    assert "| rank / mid-step / SIGKILL | goes on | not bitwise: weights (it printed: a rank died) |" in wrong
    assert "goes on, 3 s ≠ !" in wrong


def test_throttled_processes_go_on_and_one_that_is_gone_is_no_error() -> None:
    throttle("partition", 0.01, [2**22 + 1])  # above pid_max

"""The ledger of a run that goes back: samples of the steps in between count as discarded, once, and no line is lost.

Why it must hold: a step that is given up has trained nothing that is left, so a ledger that still counts it would say
that more samples made the model than did.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.checkpoint.ledger import Ledger
from miles_like.checkpoint.ledger_audit import ROLLED_BACK, audit
from tests.support.made_samples import group, sample
from tests.support.refusals import check_refusal, refuses


def of(prompt: str, n: int) -> object:
    return dataclasses.replace(group([sample(prompt, i) for i in range(n)]))


class Played:
    """A run of steps of one group of two samples each, one of which waits: what a ledger of it must say."""

    def __init__(self, path: Path) -> None:
        self.path, self.ledger = path, Ledger(path)
        self.step = self.next = 0
        self.trained: dict[int, int] = {}  # kept step -> samples
        self.given_up = self.waits = 0
        self._issue()

    def _issue(self) -> None:
        self.ledger.issue(self.next, f"p{self.next}", 2)
        self.next, self.waits = self.next + 1, self.waits + 1

    def _boundary(self) -> None:
        self.ledger.flush(self.step)
        self.saved = self.ledger.state(), self.next, self.waits

    def train(self) -> None:
        self._issue()
        self.step, self.waits = self.step + 1, self.waits - 1
        self.ledger.train(self.step, self.next - 2, of(f"p{self.next - 2}", 2))  # type: ignore[arg-type]
        self.trained[self.step] = 2
        self._boundary()

    def back(self, to: int) -> None:
        """As a run does: into a ledger that is restored from the state at the last boundary."""
        self.ledger.close()
        self.ledger = Ledger(self.path)
        state, self.next, self.waits = self.saved
        self.ledger.restore(state)
        gone = sum(self.trained.pop(step) for step in list(self.trained) if step > to)
        assert self.ledger.go_back(to) == gone
        self.given_up += gone + 2 * self.waits  # and the group that waited
        self.step, self.waits = self.step + 1, 0
        self.trained[self.step] = 0
        self._boundary()
        self._issue()

    def check(self) -> None:
        found = audit(self.path)
        assert found.wrong is None and not found.unfinished
        assert found.steps[-1].trained == sum(self.trained.values())
        assert found.steps[-1].discarded == self.given_up == found.reasons.get(ROLLED_BACK, 0)
        assert [one.step for one in found.kept] == sorted(self.trained)
        assert [one.step for one in found.steps] == list(range(1, self.step + 1))
        self.ledger.check([self.next - 1])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=14))
def test_a_run_that_goes_back_any_number_of_times_accounts_for_every_sample(
    tmp_path_factory: pytest.TempPathFactory, moves: list[int | None]
) -> None:
    """Against counts that are kept step by step. None: a step; a number: back to one of the steps that are left."""
    run = Played(tmp_path_factory.mktemp("ledger") / "ledger.jsonl")
    run.train()
    for move in moves:
        if move is None:
            run.train()
        else:
            run.back([0, *sorted(run.trained)][move % (1 + len(run.trained))])
        run.check()


def test_the_line_with_which_a_run_goes_back_and_its_wrong_forms(tmp_path: Path) -> None:
    run = Played(path := tmp_path / "ledger.jsonl")
    for _ in range(3):
        run.train()
    run.back(1)
    lines = path.read_text().splitlines()
    assert json.loads(lines[-2]) == {"step": 4, "to": 1, "rolled_back": 4}
    for wrong, facts in (
        ({"step": 4, "to": 1, "rolled_back": 3}, (4, 1, 3, 6)),
        ({"step": 4, "to": 4, "rolled_back": 4}, (4, 4)),
        ({"step": 3, "to": 1, "rolled_back": 4}, (3, 1)),
        ({"step": 4, "to": 9, "rolled_back": 4}, (4, 9)),
    ):
        path.write_text("\n".join([*lines[:-2], json.dumps(wrong), lines[-1]]) + "\n")
        check_refusal(audit(path).wrong or "", *facts)
    path.write_text("\n".join([*lines[:-3], lines[-2], lines[-3], lines[-1]]) + "\n")
    check_refusal(audit(path).wrong or "", "comes after the line with which step 4 goes back")
    path.write_text("\n".join(lines[:-1]) + "\n")  # killed between the two lines
    found = audit(path)
    assert found.wrong is None and found.unfinished == 2 and found.steps[-1].step == 3


def test_a_run_goes_back_only_to_a_step_that_it_has(tmp_path: Path) -> None:
    run = Played(tmp_path / "ledger.jsonl")
    for _ in range(3):
        run.train()
    run.back(1)
    run.train()
    state = run.ledger.state()
    run.ledger.close()
    again = Ledger(tmp_path / "ledger.jsonl")
    again.restore(state)
    with refuses(RuntimeError, "step 2"):  # given up
        again.go_back(2)
    assert again.go_back(4) == 2

"""Law: a run that a fault strikes goes on with the same driver, or is started again by --supervise; either way it ends
as the run that nothing struck, its ledger is closed, and only what was lost is another process.

A few cells of the matrix, on plain processes; `make faults` plays all of them, and keeps the results in
tests/faults/results.jsonl, which docs/reliability.md shows. A cell that does not hold today is no test here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import plain, record
from tests.faults.cells import Cell
from tests.support.chosen import later
from tests.support.local_run import Runs

HERE = "tests/faults/test_fault_matrix.py"
FIRST = ("rank / mid-step / SIGKILL", "server head / generating / SIGKILL", "driver / mid-save / SIGKILL")
LATER = (
    "rank / mid-publish / SIGSTOP",
    "server part / generating / SIGKILL",
    "server head / mid-publish / SIGSTOP",
    "teacher / mid-step / SIGKILL",
    "reward / generating / SIGKILL",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("faults")) as started:
        yield started


@pytest.mark.parametrize("name", later([*FIRST, *LATER], first=FIRST, beside=HERE))
def test_a_struck_run_ends_as_the_one_that_was_not(runs: Runs, tmp_path: Path, name: str) -> None:
    found = {"cell": name} | plain.play(Cell.named(name), runs, runs.home / "undisturbed", tmp_path / "struck")
    assert record.faults_of(found) == [], found
    assert found["seconds"] is not None and found["witness"]

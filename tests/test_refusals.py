"""The assertions on refusals and their snapshot: that they can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.refusals import ACCEPT, ONLY, ROOT, SNAPSHOT, check_refusal, normalized, occurrences, refuses

LONG = pytest.mark.long(beside="tests/test_refusals.py")
TEST = """
import pytest
from tests.support.refusals import refuses

@pytest.mark.parametrize("facts", [("train.lr", 3)])
def test_two(facts, tmp_path):
    with refuses(ValueError, *facts):
        raise ValueError(f"train.lr = 3 in {tmp_path}/a.toml: lower it")
    with refuses(KeyError, "b"):
        raise KeyError("b")

def test_unstable():
    with refuses(ValueError, 3, unrecorded="ids differ"):
        raise ValueError(f"3 of {id(object())}")

def test_without(): pass
"""
ENTRIES = {
    "test_it.py::test_two[train.lr 3]": "train.lr = 3 in <tmp>/a.toml: lower it",
    "test_it.py::test_two[train.lr 3] #2": "'b'",
}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A separate suite with an accepted snapshot."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / SNAPSHOT).write_text(json.dumps(ENTRIES))
    return tmp_path


def run(suite: Path, *arguments: str, passes: bool = True) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"PYTHONPATH": str(ROOT)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # others take a second
    done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    return done.stdout


def entries(suite: Path) -> dict[str, str]:
    return json.loads((suite / SNAPSHOT).read_text())


def edit(suite: Path, old: str, new: str) -> None:
    path = suite / "test_it.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("fact", "sentence", "times"),
    [
        ("3", "3 of 3, 13, 30, 3.5, 0.3, -3, 3-4, v3", 2),
        ("3", "ends with 3.", 1),
        ("-3", "is -3", 1),
        ("train.lr", "train.lr = 3, train.lr_min, my.train.lr, train.lr.x, train.lr", 2),
        ("lr", "train.lr", 0),
        ("--set", "--set, --set-all", 1),
        ("a.json", "/root/a.json: no", 1),
        ("[1, 2]", "layers [1, 2]", 1),
        ("fp8", "'fp8'", 1),
    ],
)
def test_a_fact_is_a_whole_token(fact: str, sentence: str, times: int) -> None:
    assert occurrences(sentence, fact) == times


def test_a_wrong_fact_type_or_count_fails() -> None:
    """Not covered: a message that has the facts and is of another refusal, which the snapshot shows."""
    for wrong in ((4,), ("lr",), (3, 3)):
        with pytest.raises(AssertionError, match="not in the message"):
            check_refusal("train.lr = 3", *wrong)
        with pytest.raises(AssertionError, match="not in the message"), refuses(ValueError, *wrong):
            raise ValueError("train.lr = 3")
    with pytest.raises(KeyError), refuses(ValueError):
        raise KeyError("a")
    with pytest.raises(pytest.fail.Exception), refuses(ValueError):
        pass
    with refuses(ValueError, "train.lr", unrecorded="its own test") as raised:
        raise ValueError("train.lr = 3")
    assert str(raised.value) == "train.lr = 3"


def test_an_unrecorded_sentence_needs_facts() -> None:
    """It is compared with no snapshot: without facts every sentence passes."""
    with pytest.raises(ValueError, match="asserts nothing"):
        check_refusal("train.lr = 3", unrecorded="its own test")
    with pytest.raises(ValueError, match="asserts nothing"), refuses(KeyError, unrecorded="its own test"):
        raise KeyError("a")


def test_what_differs_between_runs_is_not_in_the_snapshot(tmp_path: Path) -> None:
    for given, stored in (
        (f"{tmp_path}/a/b.toml: no", "<tmp>/a/b.toml: no"),
        (f"{ROOT}/configs/tiny.toml", "<root>/configs/tiny.toml"),
        ("http://127.0.0.1:40123/x and port 40123, pid 12", "http://127.0.0.1:<port>/x and port <port>, pid <pid>"),
        ("<object at 0x7f0011223344>", "<object at <address>>"),
        ("sha256 0123456789abcdef, 1152921504606846976", "sha256 <hash>, 1152921504606846976"),
    ):
        assert normalized(given) == stored


def test_an_accepted_snapshot_passes(suite: Path) -> None:
    run(suite, "--basetemp", "temporary")
    run(suite, ACCEPT)
    assert entries(suite) == ENTRIES and (suite / SNAPSHOT).read_text().count("\n") == len(ENTRIES) + 2


def test_a_changed_sentence_fails_until_it_is_accepted(suite: Path) -> None:
    edit(suite, "lower it", "reduce it")
    output = run(suite, passes=False)
    assert (
        "- train.lr = 3 in <tmp>/a.toml: lower it" in output and "+ train.lr = 3 in <tmp>/a.toml: reduce it" in output
    )
    assert f"pytest {ACCEPT} test_it.py" in output and "1 failed, 2 passed" in output
    run(suite, ACCEPT, "test_it.py::test_unstable")
    assert entries(suite) == ENTRIES
    assert "3 passed" in run(suite, ACCEPT, ONLY)
    assert list(entries(suite).values()) == ["train.lr = 3 in <tmp>/a.toml: reduce it", "'b'"]
    run(suite)


@LONG
def test_a_missing_or_superfluous_entry_fails(suite: Path) -> None:
    first, second = ENTRIES
    (suite / SNAPSHOT).write_text(json.dumps({first: ENTRIES[first]}))
    assert "(no entry)" in run(suite, passes=False)
    (suite / SNAPSHOT).write_text(json.dumps(ENTRIES | {f"{first} #3": "another"}))
    assert "- another" in run(suite, passes=False)
    (suite / SNAPSHOT).unlink()
    run(suite, passes=False)
    run(suite, ACCEPT)
    assert list(entries(suite)) == [first, second]


@LONG
def test_the_entry_of_a_test_that_is_gone_fails_and_is_removed(suite: Path) -> None:
    edit(suite, "def test_two", "def test_other")
    (suite / SNAPSHOT).write_text(json.dumps(ENTRIES | {"test_gone.py::test_x": "x"}))
    run(suite, ACCEPT, "test_it.py::test_other")
    assert "no test is test_it.py::test_two[train.lr 3]" in run(suite, passes=False)
    run(suite, "test_it.py::test_other")
    run(suite, ACCEPT)
    assert list(entries(suite)) == [key.replace("test_two", "test_other") for key in ENTRIES]


def test_a_test_that_fails_keeps_its_entries(suite: Path) -> None:
    edit(suite, "train.lr = 3", "train.lr = 4")
    assert "not in the message: '3'" in run(suite, ACCEPT, passes=False)
    assert entries(suite) == ENTRIES


def test_workers_compare_and_the_controller_writes(suite: Path) -> None:
    pytest.importorskip("xdist")
    edit(suite, "lower it", "reduce it")
    run(suite, "-n2", passes=False)
    run(suite, "-n2", ACCEPT)
    assert list(entries(suite).values()) == ["train.lr = 3 in <tmp>/a.toml: reduce it", "'b'"]
    run(suite, "-n2")

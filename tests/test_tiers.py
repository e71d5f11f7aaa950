"""`make check` starts no process: the mark follows from what a file imports, and a test without it is watched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiers import starts_processes

ROOT = Path(__file__).parents[1]
WATCHED = """
import os
import pytest

def test_quiet(): ...

def test_loud(): os.system("true")

@pytest.fixture
def loud(): os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)

def test_of_a_loud_fixture(loud): ...

@pytest.mark.slow
def test_marked(): os.system("true")
"""


@pytest.mark.parametrize(
    ("line", "starts"),
    [
        ("import subprocess", True),
        ("from ray.cluster_utils import Cluster", True),
        ("    from tests.support.spawn import free_port, run_ranks", True),
        ("from tests.support.spawn import free_port", False),
        ("import rays", False),
    ],
)
def test_a_file_is_slow_by_its_imports(tmp_path: Path, line: str, starts: bool) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(f"def test_it():\n    pass\n{line}\n" if line[0] == " " else f"{line}\n")
    assert starts_processes(path) == starts


def test_a_test_without_the_mark_that_starts_a_process_fails(tmp_path: Path) -> None:
    (tmp_path / "test_watched.py").write_text(WATCHED)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "tests.support.tiers", "--rootdir", str(ROOT)]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    reports, _, summary = done.stdout.partition("short test summary info")
    assert reports.count("Mark it with pytest.mark.slow") == 2, done.stdout
    ends = [line.partition(" - ")[0].split() for line in summary.splitlines() if "test_watched.py::" in line]
    assert {test.rpartition("::")[2]: outcome for outcome, test in ends} == {
        "test_quiet": "PASSED",
        "test_loud": "FAILED",
        "test_of_a_loud_fixture": "ERROR",
        "test_marked": "PASSED",
    }

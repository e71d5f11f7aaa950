"""`make check` starts no process: the mark follows from what a file imports, and a test without it is watched. A test
that only `make test-all` runs names the one that holds its law in `make test`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiers import in_order, starts_processes

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
LONG = """
import pytest

@pytest.mark.slow
@pytest.mark.long(beside="tests/{beside}")
def test_long(): ...

def test_short(): ...
"""

SHARED = """
import pytest

@pytest.fixture(scope="session")
def made_once(): ...

@pytest.fixture
def home(made_once): ...
"""
FILES = {
    "free": "def test_it(): ...",
    "long": LONG.format(beside="test_tiers.py").replace("test_long()", "test_long(home)"),
    "user": "def test_it(home): ...",
}


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


def pytest_in(where: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-rA",
        "-p",
        "xdist",
        "-p",
        "tests.support.tiers",
        "--rootdir",
        str(ROOT),
    ]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take a second
    return subprocess.run(
        [*command, *more, str(where)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def outcomes(summary: str) -> dict[str, str]:
    """Test -> its outcome, of the lines of a report's summary."""
    ends = [line.partition(" - ")[0].split() for line in summary.splitlines() if ".py::" in line]
    return {test.rpartition("::")[2]: outcome for outcome, test in ends}


def test_a_test_without_the_mark_that_starts_a_process_fails(tmp_path: Path) -> None:
    (tmp_path / "test_watched.py").write_text(WATCHED)
    done = pytest_in(tmp_path)
    reports, _, summary = done.stdout.partition("short test summary info")
    assert reports.count("Mark it with pytest.mark.slow") == 2, done.stdout
    assert outcomes(summary) == {
        "test_quiet": "PASSED",
        "test_loud": "FAILED",
        "test_of_a_loud_fixture": "ERROR",
        "test_marked": "PASSED",
    }


def test_a_long_test_runs_in_test_all_only_and_names_the_test_beside_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(LONG.format(beside="test_tiers.py"))
    for tier, want in (("not long", {"test_short"}), ("slow and not long", set()), ("", {"test_long", "test_short"})):
        _, _, summary = pytest_in(tmp_path, "-m", tier).stdout.partition("short test summary info")
        assert outcomes(summary) == dict.fromkeys(want, "PASSED"), tier
    for beside in ("test_gone.py", "miles_like/cluster/test_large_clusters.py"):  # the latter has long tests only
        (tmp_path / "test_it.py").write_text(LONG.format(beside=beside))
        done = pytest_in(tmp_path)
        assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
        assert "test_long" in done.stderr and f"tests/{beside}" in done.stderr


def test_what_files_share_is_made_first_and_its_users_wait_without_a_worker() -> None:
    """The longest file that needs the shared thing goes first, and a second one when the other workers have had files
    for as long as it takes to make it; the longest of what is left goes next."""
    seconds = {Path(name): t for name, t in (("c", 30.0), ("user", 90.0), ("a", 200.0), ("maker", 100.0), ("b", 110.0))}
    users = {Path("user"), Path("maker")}
    assert [p.name for p in in_order(seconds, set(), 3)] == ["a", "b", "maker", "user", "c"]
    assert [p.name for p in in_order(seconds, users, 1)] == ["maker", "a", "b", "user", "c"]
    assert [p.name for p in in_order(seconds, users, 2)] == ["maker", "a", "b", "user", "c"]
    assert [p.name for p in in_order(seconds, users, 4)] == ["maker", "a", "b", "c", "user"]


def test_the_workers_get_the_files_in_that_order(tmp_path: Path) -> None:
    """A file whose only user of the fixture is not run is no user of it."""
    (tmp_path / "conftest.py").write_text(SHARED)
    for name, text in FILES.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    done = pytest_in(tmp_path, "--dist", "loadfile", "--numprocesses", "1", "-m", "not long", "-v")
    assert done.returncode == 0, done.stdout
    assert list(dict.fromkeys(re.findall(r"PASSED \S*test_(\w+)\.py", done.stdout))) == ["user", "free", "long"]


def test_all_files_can_be_collected_in_one_run() -> None:
    """pytest imports a file outside of a package under its base name, and refuses a second file of that name. A run of
    one tier, which leaves out the files of another, does not see it."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    twice = {name: paths for name in {p.name for p in files} if len(paths := [p for p in files if p.name == name]) > 1}
    assert not twice

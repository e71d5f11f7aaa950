"""The three tiers of the tests, and the order in which their files go to the workers.

A test is `slow` when its file imports something of STARTERS, which start processes: `make check` runs the others. A
test that starts a process in another way carries `pytest.mark.slow`; without the mark it fails, so nothing that starts
processes comes back into `make check` unseen. So do further cases of tests that start none and take a second each
(`checked` of tests/support/chosen.py): `make check` has to answer within three minutes.

`make test` runs both, except tests with `pytest.mark.long(beside=FILE)`, which only `make test-all` runs: further cases
of a law that a test in FILE holds with cheaper ones in every `make test`.
"""

from __future__ import annotations

import ast
import functools
import multiprocessing.util
import re
import sys
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.support.budget import measured
from tests.support.sources import walk

ROOT = Path(__file__).parents[2]

# A name stands for all that is in it. Functions are named where other names of their module start nothing: free_port.
STARTERS = (
    "multiprocessing",
    "ray",
    "subprocess",
    "miles_like.nodes.session.start_ray",
    "rollout.sglang.servers.start",
    "rollout.sglang.startup.Startup",
    "tests.e2e.conftest",
    "tests.fuzz.served",
    "tests.support.embedded_processes",
    "tests.support.forked",
    "tests.support.installed",
    "tests.support.local_run",
    "tests.support.mid_run",
    "tests.support.namespaces.nodes",
    "tests.support.pretended.pretended_cluster",
    "tests.support.reader",
    "tests.support.spawn.run_ranks",
    "tests.support.spawn.warm_context",
    "tests.support.triton_aot.compiled",
)
_MARKED = re.compile(r"mark\.slow|\bchecked\(")  # tests/support/chosen.py
_LAST_WORDS = re.compile(rf"\b({'|'.join(name.rpartition('.')[2] for name in STARTERS)})\b")


@functools.cache
def starts_processes(path: Path) -> bool:
    """Whether a test file imports something of STARTERS, inside functions too."""
    text = path.read_text(encoding="utf-8")
    if not _LAST_WORDS.search(text):  # which each import of one has: nearly half of the files need not be parsed
        return False
    for node in walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        if any(f"{name}.".startswith(f"{starter}.") for name in names for starter in STARTERS):
            return True
    return False


@functools.cache
def has_shorter_tests(path: Path) -> bool:
    """Whether a test file has a test that is not marked long; a mark of one of a test's cases does not count."""
    if not path.is_file():
        return False
    tree = ast.parse(path.read_text(encoding="utf-8"))
    marks = {"LONG"}  # the name that files give the mark where several tests have it
    everything = [node.value for node in tree.body if isinstance(node, ast.Assign) and _names(node, "pytestmark")]
    everything = [one for mark in everything for one in (mark.elts if isinstance(mark, ast.List) else [mark])]
    if any(_is_long(mark, marks) for mark in everything):
        return False
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return any(not any(_is_long(mark, marks) for mark in test.decorator_list) for test in tests)


def _names(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _is_long(mark: ast.expr, names: Collection[str]) -> bool:
    return ast.unparse(mark).startswith("pytest.mark.long") or ast.unparse(mark) in names


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which a tier runs nothing is not imported."""
    tier, path = config.option.markexpr, collection_path
    if "slow" not in tier or path.suffix != ".py" or not path.name.startswith("test_"):
        return None
    if starts_processes(path):
        return True if tier == "not slow" else None
    return True if tier != "not slow" and not _MARKED.search(path.read_text(encoding="utf-8")) else None


@pytest.hookimpl(wrapper=True)  # in between, tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    for item in items:
        if starts_processes(item.path):
            item.add_marker(pytest.mark.slow)
        for long in item.iter_markers("long"):
            beside = long.kwargs.get("beside", "")
            if not item.get_closest_marker("slow") or not has_shorter_tests(ROOT / beside):
                raise pytest.UsageError(
                    f"{item.nodeid} is marked long(beside={beside!r}): want a slow test, and the file of a test that "
                    "holds its law in `make test`, one without the mark"
                )
    yield
    if hasattr(config, "workerinput"):
        users = {item.path for item in items if SHARED in getattr(item, "fixturenames", ())}
        files = in_order({item.path: _seconds(item.path) for item in items}, users, config.workerinput["workercount"])
        place = {path: i for i, path in enumerate(files)}
        items.sort(key=lambda item: place[item.path])


def _seconds(path: Path) -> float:
    return measured().get(path.relative_to(ROOT).as_posix(), 0.0) if path.is_relative_to(ROOT) else 0.0


SHARED = "made_once"  # fixture of what the first file that needs it makes for all
MADE_S = 150.0  # which takes so long beside other tests


def in_order(seconds: Mapping[Path, float], users: Collection[Path], workers: int) -> list[Path]:
    """The files as they go to the workers, the longest first, so that none begins when the other workers are done.

    seconds: of each file. users: files that need what one of them makes for all. The longest of these is the very
    first, and while it makes it the other workers get files that do not need it: each user would hold a worker that
    waits.
    """
    files = sorted(seconds, key=lambda path: -seconds[path])
    first = [path for path in files if path in users][:1]
    busy = (workers - 1) * MADE_S if first else 0.0
    for path in files:
        if busy > 0 and path not in users:
            first.append(path)
            busy -= seconds[path]
    return [*first, *(path for path in files if path not in first)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """A file is one worker's, because its tests share fixtures. xdist's own order is by the number of tests."""
    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


# ---- a process that is started by a test that is not slow


class _Watch:
    """Lists what the running test starts. There is one in the process: an audit hook cannot be removed."""

    def __init__(self) -> None:
        self.started: list[str] | None = None  # None: nothing is listed
        sys.addaudithook(self.hear)
        spawn = multiprocessing.util.spawnv_passfds  # raises no audit event

        def watched(path: Any, args: Sequence[Any], passfds: Any) -> int:
            if not any("resource_tracker" in str(a) for a in args):
                self.hear("multiprocessing", (args,))
            return spawn(path, args, passfds)

        multiprocessing.util.spawnv_passfds = watched

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.started is not None and event in STARTS:
            self.started.append(f"{event}{arguments[:2]}"[:300])


STARTS = ("multiprocessing", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen")


@functools.cache
def _watch() -> _Watch:
    return _Watch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    _watch().started = None if item.get_closest_marker("slow") else []
    try:
        return (yield)
    finally:
        _watch().started = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    started = _watch().started
    if started and report.passed:
        report.outcome = "failed"
        report.longrepr = (
            f"the test, or a fixture of it, starts a process: {started[0]}. Mark it with pytest.mark.slow, or name "
            "what its file imports for that in STARTERS of tests/support/tiers.py"
        )
        started.clear()
    return report

"""Assertions on refusals: a test names the facts of a message, `tests/refusals.json` holds the sentences.

    with refuses(ValueError, "train.groups_per_step", 6, 4):
        ...

passes if a ValueError is raised whose message has every fact as a whole token, and a fact that is given twice at least
twice. The message is then compared with the entry of the test in the snapshot. `pytest --accept-refusals FILE...`
writes the entries of the tests that ran.

`RefusalSnapshot` is the pytest plugin that reads, compares and writes the snapshot; `tests/conftest.py` registers it.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

SNAPSHOT = Path("tests/refusals.json")
ROOT = Path(__file__).parents[2]
ACCEPT, ONLY = "--accept-refusals", "--refusals-only"

E = TypeVar("E", bound=BaseException)
Facts = tuple[object, ...]  # of a message: config keys, names, paths, numbers, values

_TMP, _HOST = re.escape(tempfile.gettempdir()), re.escape(socket.gethostname())
_IN_TMP = r"/(popen-gw\d+/)?[^/\s'\",:;()\[\]]+"
_UNSTABLE = [
    (rf"{_TMP}/pytest-of-[^/]+/pytest-\d+{_IN_TMP}", "<tmp>"),
    (rf"{_TMP}/tmp[a-z0-9_]{{8}}", "<tmp>"),
    (rf"{_TMP}/ray/[^\s;,]+", "<ray>"),
    (r"\bnode \d+\.\d+\.\d+\.\d+", "node <address>"),
    (rf"(^|\(){_HOST}(?=[:)])", r"\1<host>"),
    (r"[^\s'\"(]*/site-packages\b", "<packages>"),
    (re.escape(str(ROOT)), "<root>"),
    (r"\b0x[0-9a-f]{6,}\b", "<address>"),
    (r"(127\.0\.0\.1|localhost|0\.0\.0\.0|[\]']):\d{4,5}\b", r"\1:<port>"),
    (r"\b(port|pid|process) \d+\b", r"\1 <\1>"),
    (r"\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{12,64}\b", "<hash>"),
    (r"(errors\.pydantic\.dev)/[\d.]+/", r"\1/<version>/"),
    (r"\b\d+\.\d{4,}(e-?\d+)?\b", "<measured>"),
]


@contextmanager
def refuses(
    error: type[E] | tuple[type[E], ...], *facts: object, unrecorded: str = ""
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Asserts that the block raises `error` with every fact in its message, and records the message.

    unrecorded: why the message has no entry in the snapshot, for one that differs between runs.
    """
    __tracebackhide__ = True
    with pytest.raises(error) as raised:
        yield raised
    check_refusal(str(raised.value), *facts, unrecorded=unrecorded)


def check_refusal(sentence: str, *facts: object, unrecorded: str = "") -> None:
    """Asserts that a sentence, as printed or as sent in a reply, has every fact, and records it. Raises ValueError for
    an unrecorded sentence without facts, of which nothing is asserted."""
    __tracebackhide__ = True
    if unrecorded and not facts:
        raise ValueError(
            f"unrecorded={unrecorded!r} without facts asserts nothing: give facts that name the cause, or record it"
        )
    wanted = Counter(map(str, facts))
    missing = [fact for fact, n in wanted.items() if occurrences(sentence, fact) < n]
    assert not missing, f"not in the message: {', '.join(map(repr, missing))}\nmessage: {sentence}"
    if not unrecorded:
        _recorded.append(normalized(sentence.strip()))


def occurrences(sentence: str, fact: str) -> int:
    """How often the fact is a whole token: 3 is not in "13", "3.5" or "-3", and train.lr is not in "train.lr_min"."""
    assert fact, "an empty fact is in every message"
    before = r"(?<!\w)(?<!\w[.\-])" if re.match(r"\w", fact) else ""
    if re.match(r"\d", fact):
        before += r"(?<![\-.])"
    after = r"(?!\w)(?![.\-]\w)" if re.search(r"\w\Z", fact) else ""
    return len(re.findall(before + re.escape(fact) + after, sentence))


def normalized(sentence: str) -> str:
    """The sentence with placeholders for what differs between machines and runs: paths, ports, process ids, hashes."""
    for pattern, placeholder in _UNSTABLE:
        sentence = re.sub(pattern, placeholder, sentence)
    return sentence


_recorded: list[str] = []  # by the test that runs, in order


def read_snapshot(path: Path) -> dict[str, list[str]]:
    """Test id -> its sentences, in order."""
    stored: dict[str, list[tuple[int, str]]] = {}
    for key, sentence in (json.loads(path.read_text("utf-8")) if path.exists() else {}).items():
        numbered = re.fullmatch(r"(.*) #(\d+)", key, re.DOTALL)
        test, number = numbered.groups() if numbered else (key, "1")
        stored.setdefault(test, []).append((int(number), sentence))
    return {test: [sentence for _, sentence in sorted(sentences)] for test, sentences in stored.items()}


def write_snapshot(path: Path, stored: dict[str, list[str]]) -> None:
    """One sentence a line, sorted: `test id` is the key of a test's first, `test id #2` of its second."""
    lines = {
        test if i == 1 else f"{test} #{i}": sentence
        for test, sentences in sorted(stored.items())
        for i, sentence in enumerate(sentences, 1)
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(lines, indent=0, ensure_ascii=False) + "\n", "utf-8")
    part.replace(path)


def difference(test: str, wanted: list[str], recorded: list[str]) -> str:
    """What the report of a failed test shows."""
    lines = [f"its refusals are not those of {SNAPSHOT}:"]
    for old, new in itertools.zip_longest(wanted, recorded, fillvalue="(no entry)"):
        lines += [f"  - {old}", f"  + {new}"] if old != new else [f"    {old}"]
    return "\n".join([*lines, f"accept them with: python -m pytest {ACCEPT} {test.partition('::')[0]}"])


class RefusalSnapshot:
    """Compares what each test recorded with the snapshot, or writes it to the snapshot if the option asks for that.

    With xdist the workers compare and send what they recorded to the controller, which writes the file.
    """

    def __init__(self, config: pytest.Config) -> None:
        if given := config.getoption("basetemp"):
            _UNSTABLE.insert(0, (re.escape(str(Path(given).absolute())) + _IN_TMP, "<tmp>"))
        self.config = config
        self.path = config.rootpath / SNAPSHOT
        self.accept: bool = config.getoption(ACCEPT)
        self.only: bool = config.getoption(ONLY)
        self.stored = read_snapshot(self.path)
        self.passed: dict[str, list[str]] = {}  # test that passed -> what it recorded
        self.collected: set[str] = set()

    @pytest.hookimpl(tryfirst=True)  # before -k and -m take tests away
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.collected = {item.nodeid for item in items}
        if self.only:
            without = [item for item in items if not (item.nodeid in self.stored or _records(item))]
            self.config.hook.pytest_deselected(items=without)
            items[:] = [item for item in items if item not in set(without)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        _recorded.clear()
        yield
        self.passed[item.nodeid] = list(_recorded)
        wanted = self.stored.get(item.nodeid, [])
        if not self.accept and _recorded != wanted:
            pytest.fail(difference(item.nodeid, wanted, _recorded), pytrace=False)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        passed, collected = getattr(node, "workeroutput", {}).get("refusals", ({}, []))
        self.passed |= passed
        self.collected |= set(collected)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["refusals"] = (self.passed, sorted(self.collected))
        elif self.accept:
            stored = read_snapshot(self.path) | self.passed
            gone = self.without_test(stored)
            write_snapshot(self.path, {test: stored[test] for test in stored if stored[test] and test not in gone})
        elif self.without_test(self.stored) and not self.config.option.collectonly:
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in [] if self.accept else sorted(self.without_test(self.stored)):
            file = test.partition("::")[0]
            run = f"{ACCEPT} {file}" if (self.config.rootpath / file).exists() else f"{ACCEPT} {ONLY}"
            terminalreporter.line(f"{SNAPSHOT}: no test is {test}, remove it with: python -m pytest {run}")

    def without_test(self, stored: dict[str, list[str]]) -> set[str]:
        """The entries whose file does not exist, or was collected as a whole and has no such test."""
        parts = {argument.partition("::")[0] for argument in self.config.args if "::" in argument}
        files = {test.partition("::")[0] for test in self.collected} - parts
        return {
            test
            for test in stored
            if test not in self.collected
            and ((file := test.partition("::")[0]) in files or not (self.config.rootpath / file).exists())
        }


def _records(item: pytest.Item) -> bool:
    return _speaks_of_refusals(item.path)


@cache
def _speaks_of_refusals(path: Path) -> bool:
    """Whether a file names refusals at all: a test may record one through a helper or within a coroutine."""
    return "refus" in path.read_text(encoding="utf-8")

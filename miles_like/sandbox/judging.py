"""Judges a program by tests in a sandbox: which of them pass."""

from __future__ import annotations

import ast
import contextlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from miles_like.sandbox.harness import load
from miles_like.sandbox.program import Program, Ran, Sandbox, Status

HARNESS = Path(__file__).with_name("harness.py").read_text(encoding="utf-8")
MODULE = "solution"  # the program's, for tests that import it
_MOST_EXPECTED = 100_000  # characters of an expression that is read as a value


@dataclass(frozen=True, slots=True)
class Printed:
    """The program gets `stdin` and must print `output`; spaces at the ends of lines and empty lines at the end do not
    count."""

    stdin: str
    output: str


@dataclass(frozen=True, slots=True)
class Equal:
    """`assert CALL == VALUE`: the sandbox evaluates the call, and the value is compared outside of it."""

    call: str
    value: Any


@dataclass(frozen=True, slots=True)
class Source:
    """Any other test: statements, functions `test...`, unittest's classes, or a function `check` of the function
    `entry`."""

    source: str
    entry: str = ""


Test: TypeAlias = Printed | Equal | Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """passed: of `tests`. ended: how often a run ended otherwise than by itself, by its status. failures: a test's name
    -> why it fails; of tests that were not reached, that of the first."""

    passed: int
    tests: int
    ended: Mapping[Status, int]
    failures: Mapping[str, str]

    @property
    def why(self) -> str:
        """Of the first failure; "" where there is none."""
        return next(iter(self.failures.values()), "")

    @property
    def share(self) -> float:
        return self.passed / self.tests


def read_tests(column: object, entry: str = "") -> list[Test]:
    """The tests of a row: a list of objects with `input` and `output`, a list of texts, each a test in Python, or one
    text. A JSON text of such a list is read too. Raises ValueError for anything else, and for an empty list."""
    if isinstance(column, str):
        try:
            parsed = json.loads(column)
        except ValueError:
            parsed = None
        column = parsed if isinstance(parsed, list | dict) else [column]
    if isinstance(column, Mapping):  # columns of lists, as in TACO and APPS
        inputs, outputs = column.get("inputs"), column.get("outputs")
        if not (isinstance(inputs, Sequence) and isinstance(outputs, Sequence) and len(inputs) == len(outputs)):
            raise ValueError(f"the tests are an object with the keys {sorted(column)}: expected inputs and outputs")
        column = [{"input": a, "output": b} for a, b in zip(inputs, outputs, strict=True)]
    if not isinstance(column, Sequence) or not column:
        raise ValueError(f"the tests are {column!r:.80}: expected a list with at least one test")
    return [_test(one, entry) for one in column]


def _test(one: object, entry: str) -> Test:
    if isinstance(one, Mapping):
        if not (isinstance(one.get("input"), str) and isinstance(one.get("output"), str)):
            raise ValueError(f"a test has the keys {sorted(one)}: expected the texts input and output")
        return Printed(one["input"], one["output"])
    if not isinstance(one, str) or not one.strip():
        raise ValueError(f"a test is {one!r:.80}: expected a text of Python, or an object with input and output")
    try:
        tree = ast.parse(one)
    except SyntaxError as e:
        raise ValueError(f"a test is no Python ({e.msg} in line {e.lineno}): {one[:80]!r}") from None
    if all(_tests_nothing(statement, entry) for statement in tree.body):
        why = (
            "its function check needs the column of reward.unit_tests.entry_key" if "def check" in one else "add a test"
        )
        raise ValueError(f"a test has definitions alone, so that every program would pass ({why}): {one[:80]!r}")
    return _equality(tree) or Source(one, entry)


def _tests_nothing(statement: ast.stmt, entry: str) -> bool:
    """Whether it neither calls anything when it is run nor defines what the harness calls."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return not (name.startswith("test") or (name == "check" and entry))
        case ast.ClassDef(name=name, bases=bases):
            return not (bases or name.startswith("Test"))
        case ast.Assign() | ast.AnnAssign() | ast.Expr(value=ast.Constant()):
            return not any(isinstance(node, ast.Call) for node in ast.walk(statement))
        case _:
            return isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass)


def _equality(tree: ast.Module) -> Equal | None:
    """`assert CALL == VALUE`, whose right side is a literal."""
    match tree.body:
        case [ast.Assert(test=ast.Compare(left=ast.Call() as left, ops=[ast.Eq()], comparators=[right]))]:
            text = ast.unparse(right)
            try:
                return Equal(ast.unparse(left), ast.literal_eval(text)) if len(text) < _MOST_EXPECTED else None
            except ValueError:
                return None
    return None


def modules_of(files: Iterable[str]) -> list[str]:
    """Names of the modules among paths of files."""
    return [path.removesuffix(".py") for path in files if path.endswith(".py") and "/" not in path]


async def judge(
    sandbox: Sandbox,
    code: str,
    tests: Sequence[Test],
    *,
    until_failure: bool = False,
    files: Mapping[str, bytes] = {},
    modules: Sequence[str] = (MODULE,),
) -> Judged:
    """Runs the program `code`, or the modules in `files`, with the tests. until_failure: stop at the first printed
    output that is wrong. modules: those whose names tests have; others of `files` are the program's alone. Raises
    SandboxLost."""
    ended: dict[Status, int] = {}
    failures: dict[str, str] = {}
    passed = 0
    printed = [t for t in tests if isinstance(t, Printed)]
    for k, test in enumerate(printed):
        ran = await sandbox.run(Program(code=code or "\n", stdin=test.stdin.encode(), files=files))
        _count(ended, ran)
        right = ran.succeeded and _lines(ran.stdout) == _lines(test.output)
        passed += right
        if not right:
            failures[f"input {k}"] = _end_of(ran) or f"it printed {ran.stdout[:100]!r}"
            if until_failure:
                return Judged(passed=passed, tests=len(tests), ended=ended, failures=failures)
    others = [t for t in tests if not isinstance(t, Printed)]
    n = len(printed)
    if others:
        more, of = await _called(sandbox, others, files or {f"{MODULE}.py": code.encode()}, modules, ended, failures)
        passed, n = passed + more, n + of
    return Judged(passed=passed, tests=n, ended=ended, failures=failures)


async def _called(
    sandbox: Sandbox,
    tests: Sequence[Equal | Source],
    files: Mapping[str, bytes],
    modules: Sequence[str],
    ended: dict[Status, int],
    failures: dict[str, str],
) -> tuple[int, int]:
    """(passed, tests) of tests that call the program; all in one run. Adds to `ended` and `failures`."""
    nonce = secrets.token_hex(16)
    request = {"nonce": nonce, "modules": list(modules), "tests": [_request(t) for t in tests]}
    ran = await sandbox.run(Program(code=HARNESS, files=files, stdin=json.dumps(request).encode()))
    _count(ended, ran)
    verdicts: list[list[dict[str, Any]]] = [[] for _ in tests]
    for line in ran.stdout.splitlines():
        mark, _, text = line.partition(" ")
        if mark == nonce:
            with contextlib.suppress(ValueError):  # the line at which the output was cut
                verdict = json.loads(text)
                verdicts[verdict["test"]].append(verdict)
    passed, n = 0, 0
    for i, (test, found) in enumerate(zip(tests, verdicts, strict=True)):
        of = next((v["of"] for v in found if "of" in v), 1)
        wrong = {(v["name"] or f"test {i}"): v.get("why", "") for v in found if not v.get("right", True)}
        right = sum(v.get("right", False) for v in found)
        if isinstance(test, Equal):
            right = _is_equal(test, found)
            if found and "value" in found[0] and not right:
                wrong[test.call] = f"it is not {test.value!r:.200}"
        if right + len(wrong) < of:
            wrong.setdefault(f"test {i}", _end_of(ran) or "it gave no verdict")
        failures |= wrong
        passed, n = passed + right, n + of
    return passed, n


def _request(test: Equal | Source) -> dict[str, str]:
    if isinstance(test, Equal):
        return {"kind": "value", "source": test.call}
    return {"kind": "source", "source": test.source, "entry": test.entry}


def _is_equal(test: Equal, found: Sequence[Mapping[str, Any]]) -> bool:
    if len(found) != 1 or "value" not in found[0]:
        return False
    try:
        return bool(load(found[0]["value"]) == test.value)
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _count(ended: dict[Status, int], ran: Ran) -> None:
    if ran.status is not Status.EXIT:
        ended[ran.status] = ended.get(ran.status, 0) + 1


def _end_of(ran: Ran) -> str:
    if ran.status is not Status.EXIT:
        return f"it was ended: {ran.status.value}" + (f" {ran.code}" if ran.status is Status.SIGNAL else "")
    return ran.stderr.strip().rpartition("\n")[2] if ran.code else ""

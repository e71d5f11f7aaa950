"""The verdict of tests beside a program: problems and their mutants, against plain pytest; programs that try to pass
without a solution.

Not covered: tests of classes, whose objects are no plain data.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_like.sandbox.config import SandboxConfig
from miles_like.sandbox.harness import dump, load
from miles_like.sandbox.judging import Equal, Judged, Printed, Source, judge, read_tests
from miles_like.sandbox.make import make_pool
from miles_like.sandbox.pool import SandboxPool
from tests.support.debian import need_programs
from tests.support.problems import Problem, hacks, problems
from tests.support.refusals import refuses

PROBLEMS = problems()
DOUBLE = [
    "assert double(2) == 4",
    "def test_it():\n    assert double(3) == 6",
    "import unittest\nclass It(unittest.TestCase):\n    def test_it(self): self.assertEqual(double(4), 8)",
    "assert all([double(5) == 10])",
    "for n in range(5, 9):\n    assert double(n) == 2 * n and all([double(n) == n + n])",
]

WAITED_FOR = ("it never answers", "it answers without end", "it stops the tests")  # until the time limit


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    need_programs("bwrap", "setpriv")
    made = make_pool(SandboxConfig(kind="bwrap", slots=2, wall_s=2.0, cpu_s=1, memory_mb=256))
    yield made
    made.end()


def judged(pool: SandboxPool, problem: Problem, code: str) -> Judged:
    return asyncio.run(judge(pool, code, read_tests(problem.tests, problem.entry_point)))


def test_solutions_pass_and_mutants_fail(pool: SandboxPool) -> None:
    assert len(PROBLEMS) == 60 and all(len(p.mutants) >= 3 for p in PROBLEMS)

    async def all_of() -> list[tuple[str, bool, Judged]]:
        asked = [
            (p, code, right) for p in PROBLEMS for code, right in [(p.solution, True), *((m, False) for m in p.mutants)]
        ]
        found = await asyncio.gather(
            *(judge(pool, code, read_tests(p.tests, p.entry_point), until_failure=True) for p, code, _ in asked)
        )
        return [(p.id, right, one) for (p, _, right), one in zip(asked, found, strict=True)]

    wrong = [(name, right, one) for name, right, one in asyncio.run(all_of()) if (one.passed == one.tests) is not right]
    assert not wrong


def test_verdicts_are_those_of_plain_pytest(tmp_path: Path, pool: SandboxPool) -> None:
    """Of all solutions and of some mutants, each problem with its tests as a file of pytest in a process."""
    chosen = [p for p in PROBLEMS if not isinstance(p.tests[0], dict)]
    want = {}
    for n, p in enumerate(chosen):
        for k, code in enumerate([p.solution, *p.mutants[: n % 3 == 0]]):
            name = f"{p.id}_{k}"
            (tmp_path / f"mod_{name}.py").write_text(code)
            tests = [p.tests] if isinstance(p.tests, str) else p.tests
            body = [f"def test_{i}():\n    {t}\n" if t.startswith("assert") else t for i, t in enumerate(tests)]
            text = "\n".join(body).replace("from solution import", f"from mod_{name} import")
            if "def check(" in text:
                text += f"\ndef test_check():\n    check({p.entry_point})\n"
            elif "def test" not in text:
                text = "def test_all():\n" + "\n".join(f"    {line}" for line in text.splitlines())
            (tmp_path / f"test_{name}.py").write_text(f"from mod_{name} import *\n{text}")
            want[name] = judged(pool, p, code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-rA", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    for name, found in want.items():
        lines = [line for line in done.stdout.splitlines() if f" test_{name}.py::" in line]
        passed = sum(line.startswith("PASSED") for line in lines)
        assert (passed, len(lines)) == (found.passed, found.tests), (name, found, lines)


def cases() -> list[object]:
    """Two that only wait for the time limit, as a third one does, are long."""
    long = pytest.mark.long(beside="tests/miles_like/sandbox/test_judging.py")
    return [pytest.param(name, marks=long if name in WAITED_FOR[1:] else ()) for name in hacks()]


@pytest.mark.parametrize("name", cases())
def test_a_program_does_not_decide_its_verdict(name: str, pool: SandboxPool) -> None:
    for tests in [DOUBLE, *([test] for test in DOUBLE if name not in WAITED_FOR)]:
        found = asyncio.run(judge(pool, hacks()[name], read_tests(tests)))
        assert found.passed == 0 and found.tests == len(tests), (tests, found)


def test_the_program_that_computes_it_passes(pool: SandboxPool) -> None:
    """The tests of the hacks can pass, and a program that prints does not disturb them."""
    code = "import sys\nprint('NONCE {}')\ndef double(n):\n    print(n, file=sys.stderr); print(n)\n    return 2 * n"
    found = asyncio.run(judge(pool, code, read_tests(DOUBLE)))
    assert (found.passed, found.tests) == (5, 5), found


def test_modules_of_the_program_hide_none_of_the_tests(pool: SandboxPool) -> None:
    files = {"solution.py": b"import colorsys\ndef double(n): return 0", "colorsys.py": b"def rgb_to_hsv(*a): return 4"}
    tests = read_tests(["import colorsys\nassert colorsys.rgb_to_hsv(0, 0, double(2)) == 4", "assert double(0) == 0"])
    found = asyncio.run(judge(pool, "", tests, files=files))
    assert found.passed == 1 and found.failures.keys() == {"test 0"}, found


def test_each_test_of_a_source_counts(pool: SandboxPool) -> None:
    source = "def test_a():\n    assert double(1) == 2\ndef test_b():\n    assert double(1) == 3\n"
    found = asyncio.run(judge(pool, "def double(n): return 2 * n", read_tests([source, "assert double(0) == 0"])))
    assert (found.passed, found.tests, found.why) == (2, 3, "AssertionError: ")


def test_a_test_that_is_only_begun_does_not_pass(pool: SandboxPool) -> None:
    asynchronous = "async def test_a():\n    assert double(1) == 3\nasync def test_b():\n    assert double(1) == 2\n"
    generator = "def test_c():\n    assert double(1) == 2\n    yield\n"
    found = asyncio.run(judge(pool, "def double(n): return 2 * n", read_tests([asynchronous, generator])))
    assert (found.passed, found.tests, sorted(found.failures)) == (1, 3, ["test_a", "test_c"])


def test_a_printed_output_is_compared_outside(pool: SandboxPool) -> None:
    tests = read_tests({"inputs": ["1\n", "2\n"], "outputs": ["2", "4\n\n"]})
    right = "print(2 * int(input()))  "
    assert asyncio.run(judge(pool, right, tests)).passed == 2
    assert asyncio.run(judge(pool, "print(2)", tests)).passed == 1
    assert asyncio.run(judge(pool, right + "\nraise SystemExit(1)", tests)).passed == 0
    assert asyncio.run(judge(pool, "print(2)\nwhile True: pass", tests, until_failure=True)).ended == {"time": 1}


def test_what_a_row_may_have() -> None:
    assert read_tests('["assert f(1) == [2, (3,)]"]') == [Equal("f(1)", [2, (3,)])]
    assert read_tests("assert f(1) == g(2)") == [Source("assert f(1) == g(2)")]
    assert read_tests([{"input": "1", "output": "2"}]) == [Printed("1", "2")]
    with refuses(ValueError, "[]"):
        read_tests([])
    with refuses(ValueError, "input", "output"):
        read_tests([{"stdin": "1"}])
    with refuses(ValueError, "assert f("):
        read_tests(["assert f("])
    with refuses(ValueError, "inputs", "outputs"):
        read_tests({"inputs": ["1"], "outputs": []})
    check = "METADATA = {}\ndef check(candidate):\n    assert candidate(1) == 2\n"
    assert read_tests(check, "f") == [Source(check, "f")] and read_tests(check + "check(f)")
    with refuses(ValueError, "reward.unit_tests.entry_key"):
        read_tests(check)
    with refuses(ValueError, "nothing", "add a test"):
        read_tests(["# nothing"])


def test_plain_data_comes_back_equal() -> None:
    value = [1, -(2**70), 1.5, float("inf"), "é", None, True, (1, (2,)), {1, 2}, frozenset([3]), {(1, 2): [b"x"]}, 1j]
    assert load(dump(value)) == value and type(load(dump(value))[7]) is tuple
    with pytest.raises(TypeError):
        dump([type("Own", (int,), {})(1)])

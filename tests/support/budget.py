"""The budget of the tests: seconds a folder, in tests/budget.toml, held against the junit files of a run.

python -m tests.support.budget junit.xml [more.xml ...]            the table; status 1 for what is over its budget
python -m tests.support.budget --rewrite junit.xml [more.xml ...]  also set budget and order by this run
python -m tests.support.budget --check junit.xml                   of `make check`, which has a limit by the clock
python -m tests.support.budget --ci SECONDS                        of .ci/run, which took so long

A test's seconds are those of its setup, call and teardown. Files run side by side, so a folder's share of the time by
the clock is less than its sum.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
BUDGET = TESTS / "budget.toml"
SECONDS = TESTS / "seconds.json"  # of each file, as last measured: the order in which files are handed out
LISTED_S = 1.0  # files of less are in no order
TABLE = "[seconds]"  # the last one of BUDGET


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """On two idle cores: `seconds` of each folder, and by the clock `wall_s` of all, `check_s` of `make check` and
    `ci_s` of .ci/run. A slower machine may take `factor` times that, and `extra_s`. The sum of `seconds` is at most
    `baseline_s` and `growth_s`."""

    seconds: Mapping[str, float]
    wall_s: float
    check_s: float
    ci_s: float
    baseline_s: float
    growth_s: float
    factor: float
    extra_s: float

    def allowed(self, seconds: float) -> float:
        return seconds * self.factor + self.extra_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """`seconds` and `cases` of each test file; `wall_s` of the runs, one after the other."""

    seconds: Mapping[str, float]
    cases: Mapping[str, int]
    wall_s: float


def load(path: Path = BUDGET) -> Budget:
    with path.open("rb") as f:
        values = tomllib.load(f)
    return Budget(seconds=values["seconds"], **values["run"])


@functools.cache
def measured() -> Mapping[str, float]:
    """Seconds of the test files that take long; empty where none is kept. Nothing but the order depends on it."""
    return dict(json.loads(SECONDS.read_text(encoding="utf-8"))) if SECONDS.exists() else {}


def file_of(classname: str) -> str:
    """tests.laws.test_kills, which a class may follow -> tests/laws/test_kills.py"""
    parts = classname.split(".")
    end = next((i for i, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "/".join(parts[: end + 1]) + ".py"


def taken(junits: Iterable[Path]) -> Taken:
    seconds, cases, wall = defaultdict[str, float](float), defaultdict[str, int](int), 0.0
    for junit in junits:
        for suite in ET.parse(junit).getroot().iter("testsuite"):
            wall += float(suite.get("time") or 0)
            for case in suite.iter("testcase"):
                file = file_of(case.get("classname") or "")
                seconds[file] += float(case.get("time") or 0)
                cases[file] += 1
    return Taken(seconds=seconds, cases=cases, wall_s=wall)


def by_folder(files: Mapping[str, float]) -> dict[str, float]:
    out = defaultdict[str, float](float)
    for file, value in files.items():
        out[file.rpartition("/")[0]] += value
    return out


def over(found: Taken, budget: Budget, *, check: bool = False) -> list[str]:
    """What is over the budget, a sentence each; check: of a run of `make check`."""
    wrong = grown(budget)
    for folder, took in sorted(by_folder(found.seconds).items()):
        if folder not in budget.seconds:
            wrong.append(f"{folder} took {took:.0f} s and has no line in {BUDGET.name}")
        elif took > budget.allowed(budget.seconds[folder]):
            of = budget.seconds[folder]
            wrong.append(f"{folder} took {took:.0f} s, its budget is {of:.0f} s, at most {budget.allowed(of):.0f} s")
    return wrong + too_long(found.wall_s, budget.check_s if check else budget.wall_s, budget)


def too_long(took: float, of: float, budget: Budget) -> list[str]:
    """A sentence where a run took longer by the clock than its budget `of` allows."""
    most = budget.allowed(of)
    return [f"the run took {took:.0f} s, its budget is {of:.0f} s, at most {most:.0f} s"] if took > most else []


def grown(budget: Budget) -> list[str]:
    """A sentence where the folders' seconds have grown by more than one issue may add."""
    total, most = sum(budget.seconds.values()), budget.baseline_s + budget.growth_s
    if total <= most:
        return []
    return [
        f"the folders of {BUDGET.name} have {total:.0f} s, more than baseline_s + growth_s = {most:.0f} s: make tests "
        "faster, or mark further cases of a law long"
    ]


def table(found: Taken, budget: Budget) -> str:
    seconds, cases = by_folder(found.seconds), by_folder(found.cases)
    rows = [f"{'folder':<40}{'cases':>7}{'seconds':>9}{'budget':>8}"]
    for folder, took in sorted(seconds.items(), key=lambda item: -item[1]):
        rows.append(f"{folder:<40}{cases[folder]:>7.0f}{took:>9.1f}{budget.seconds.get(folder, 0):>8.0f}")
    rows.append(
        f"{'all':<40}{sum(cases.values()):>7.0f}{sum(seconds.values()):>9.1f}{sum(budget.seconds.values()):>8.0f}"
    )
    rows.append(f"{'by the clock':<47}{found.wall_s:>9.1f}{budget.wall_s:>8.0f}")
    return "\n".join(rows)


def rewrite(found: Taken) -> None:
    """The diff of tests/budget.toml shows what an issue adds."""
    text = BUDGET.read_text(encoding="utf-8")
    rows = sorted(by_folder(found.seconds).items())
    lines = "".join(f'"{folder}" = {max(1, math.ceil(took))}\n' for folder, took in rows)
    BUDGET.write_text(text[: text.index(f"\n{TABLE}\n")] + f"\n{TABLE}\n{lines}", encoding="utf-8")
    kept = {file: round(took, 1) for file, took in sorted(found.seconds.items()) if took >= LISTED_S}
    SECONDS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.budget")
    parser.add_argument("junit", type=Path, nargs="*")
    parser.add_argument("--rewrite", action="store_true", help=f"write {BUDGET.name} and {SECONDS.name} by this run")
    parser.add_argument("--check", action="store_true", help="hold `make check`'s limit by the clock")
    parser.add_argument("--ci", type=float, metavar="SECONDS", help="hold .ci/run's limit by the clock")
    args = parser.parse_args(arguments)
    found = taken(args.junit)
    if args.rewrite:
        rewrite(found)
    budget = load()
    if args.ci is not None:
        wrong = too_long(args.ci, budget.ci_s, budget)
    else:
        print(table(found, budget))
        wrong = over(found, budget, check=args.check)
    for sentence in wrong:
        print(f"over budget: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

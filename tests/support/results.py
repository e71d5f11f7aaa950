"""Write a run of the long tier into tests/RESULTS.md: python -m tests.support.results long.xml --collected long.txt

A row holds the last run of a file, so that the tier may be run in parts. `long.txt` is what `pytest --collect-only -qq`
prints for that run: of a run that was stopped, a row says how many of the file's cases have run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support.budget import file_of

RESULTS = Path(__file__).parents[1] / "RESULTS.md"
HEAD = """# Last run of the long tier

Further cases of the slowest tests, which `make test-all` runs beside those of `make test`; every commit passes the
latter. Written by `make test-long`, which runs all files, and by `make test-long ONLY='tests/laws'`, which replaces the
rows of some: the tier takes about two hours on two cores. The long tier of tests/fuzz has its own tables:
[fuzz/RESULTS.md](fuzz/RESULTS.md).

"""
COLUMNS = ("file", "cases", "failures", "errors", "skipped", "seconds", "commit", "date", "machine")
OUTCOMES = {"failure": "failures", "error": "errors", "skipped": "skipped"}  # of junit's elements


class Row(NamedTuple):
    """A file's last run."""

    file: str
    cases: str
    failures: str
    errors: str
    skipped: str
    seconds: str
    commit: str
    date: str
    machine: str


def commit(*written: Path) -> str:
    """Short hash of HEAD, with "+" for a changed tree. `written` are files that the command itself writes."""
    root = Path(__file__).parents[2]

    def git(*words: str) -> str:
        return subprocess.run(("git", *words), cwd=root, capture_output=True, text=True).stdout.strip()

    excluded = [f":(exclude){path.relative_to(root)}" for path in written]
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", *excluded)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + "+" * bool(changed)


def about() -> dict[str, str]:
    """Date and machine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }


def collected(text: str) -> dict[str, int]:
    """Cases of each file, from lines `tests/laws/test_kills.py: 12`."""
    return {file: int(count) for file, count in re.findall(r"^(\S+\.py): (\d+)$", text, re.MULTILINE)}


def rows(junit: Path, expected: Mapping[str, int], *, of: str) -> tuple[list[Row], list[str]]:
    """A row for each file of which a case has run, and the ids of those that failed. of: the commit."""
    counts, failed = defaultdict[str, Counter[str]](Counter), []
    seconds = defaultdict[str, float](float)
    for case in ET.parse(junit).getroot().iter("testcase"):
        name = case.get("classname") or ""
        file = file_of(name)
        counts[file]["cases"] += 1
        seconds[file] += float(case.get("time") or 0)
        outcome = next((OUTCOMES[part.tag] for part in case if part.tag in OUTCOMES), None)
        if outcome is not None:
            counts[file][outcome] += 1
        if outcome in ("failures", "errors"):
            failed.append(f"{file}::{case.get('name')}")
    made = about()
    return [
        Row(
            file=file,
            cases=_of(own["cases"], expected.get(file, own["cases"])),
            failures=f"{own['failures']}",
            errors=f"{own['errors']}",
            skipped=f"{own['skipped']}",
            seconds=f"{seconds[file]:,.0f}",
            commit=of,
            **made,
        )
        for file, own in sorted(counts.items())
    ], failed


def _of(ran: int, expected: int) -> str:
    return f"{ran}" if ran >= expected else f"{ran} of {expected}"


def kept(text: str) -> tuple[list[Row], list[str]]:
    """The rows of the table in a page, and the ids of the cases that failed."""
    found = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines()]
    table = [Row(*cells) for cells in found if len(cells) == len(COLUMNS) and cells[0].startswith("tests")]
    return table, re.findall(r"^- `(.+)`$", text, re.MULTILINE)


def page(new: Iterable[Row], failed: Iterable[str], before: tuple[list[Row], list[str]]) -> str:
    """RESULTS.md with rows and failed cases that replace those before of the same files."""
    renewed = {row.file: row for row in new}
    table = {row.file: row for row in before[0]} | renewed
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(table[file]) + " |" for file in sorted(table)]
    ids = [f"- `{name}`" for name in (*(n for n in before[1] if n.partition("::")[0] not in renewed), *failed)]
    return HEAD + "\n".join([*lines, *(["", "Failed in the last run:", "", *ids] if ids else []), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("junit", type=Path)
    parser.add_argument("--collected", type=Path, required=True)
    given = parser.parse_args()
    fuzz = RESULTS.parent / "fuzz" / RESULTS.name
    new, failed = rows(given.junit, collected(given.collected.read_text(encoding="utf-8")), of=commit(RESULTS, fuzz))
    before = kept(RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "")
    RESULTS.write_text(page(new, failed, before), encoding="utf-8")


if __name__ == "__main__":
    main()

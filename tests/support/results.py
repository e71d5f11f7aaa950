"""Write a run of the long tier into tests/RESULTS.md: python -m tests.support.results long.xml --collected long.txt

A row holds the last run of a folder, so that the tier may be run in parts. `long.txt` is what
`pytest --collect-only -qq` prints for that run: of a run that was stopped, a row says how many of the folder's cases
have run.
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
latter. Written by `make test-long`, which runs all folders, and by `make test-long ONLY='tests/laws'`, which replaces
the rows of some: the tier takes about two hours on two cores. The long tier of tests/fuzz has its own tables:
[fuzz/RESULTS.md](fuzz/RESULTS.md).

"""
COLUMNS = ("folder", "cases", "failures", "errors", "skipped", "seconds", "commit", "date", "machine")
OUTCOMES = {"failure": "failures", "error": "errors", "skipped": "skipped"}  # of junit's elements


class Row(NamedTuple):
    """A folder's last run. seconds: of its cases, several of which run at once."""

    folder: str
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
    """Cases of each folder, from lines `tests/laws/test_kills.py: 12`."""
    out = Counter[str]()
    for file, count in re.findall(r"^(\S+\.py): (\d+)$", text, re.MULTILINE):
        out[file.rpartition("/")[0]] += int(count)
    return dict(out)


def rows(junit: Path, expected: Mapping[str, int], *, of: str) -> tuple[list[Row], list[str]]:
    """A row for each folder of which a case has run, and the ids of those that failed. of: the commit."""
    counts, failed = defaultdict[str, Counter[str]](Counter), []
    seconds = defaultdict[str, float](float)
    for case in ET.parse(junit).getroot().iter("testcase"):
        name = case.get("classname") or ""
        folder = file_of(name).rpartition("/")[0]
        counts[folder]["cases"] += 1
        seconds[folder] += float(case.get("time") or 0)
        outcome = next((OUTCOMES[part.tag] for part in case if part.tag in OUTCOMES), None)
        if outcome is not None:
            counts[folder][outcome] += 1
        if outcome in ("failures", "errors"):
            failed.append(f"{file_of(name)}::{case.get('name')}")
    made = about()
    return [
        Row(
            folder=folder,
            cases=_of(own["cases"], expected.get(folder, own["cases"])),
            failures=f"{own['failures']}",
            errors=f"{own['errors']}",
            skipped=f"{own['skipped']}",
            seconds=f"{seconds[folder]:,.0f}",
            commit=of,
            **made,
        )
        for folder, own in sorted(counts.items())
    ], failed


def _of(ran: int, expected: int) -> str:
    return f"{ran}" if ran >= expected else f"{ran} of {expected}"


def kept(text: str) -> list[Row]:
    """The rows of the table in a page."""
    found = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines()]
    return [Row(*cells) for cells in found if len(cells) == len(COLUMNS) and cells[0].startswith("tests")]


def page(new: Iterable[Row], before: Iterable[Row], failed: Iterable[str]) -> str:
    """RESULTS.md with rows that replace those before of the same folders."""
    table = {row.folder: row for row in (*before, *new)}
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(table[folder]) + " |" for folder in sorted(table)]
    ids = [f"- `{name}`" for name in failed]
    return HEAD + "\n".join([*lines, *(["", "Failed in the last run:", "", *ids] if ids else []), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("junit", type=Path)
    parser.add_argument("--collected", type=Path, required=True)
    given = parser.parse_args()
    fuzz = RESULTS.parent / "fuzz" / RESULTS.name
    new, failed = rows(given.junit, collected(given.collected.read_text(encoding="utf-8")), of=commit(RESULTS, fuzz))
    before = kept(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    RESULTS.write_text(page(new, before, failed), encoding="utf-8")


if __name__ == "__main__":
    main()

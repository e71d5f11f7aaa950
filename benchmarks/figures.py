"""Figures in README and docs: a block of a page that the script which measured them writes, with commit and machine.

    <!-- figures: benchmarks/codec.py -->
    | figure | value | goal |
    ...
    Commit 1a2b3c4, 2026-11-23, AMD EPYC, 2 cores, load 0.3; Python 3.11.9, torch 2.13.0: `python benchmarks/codec.py`
    <!-- end of figures -->

Every benchmark ends with `finish`: one JSON object as the last line of its output and, with `--write`, its block of
docs/benchmarks.md. tests/test_figures.py holds pages and scripts to this form.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
END = "<!-- end of figures -->"


def begin(script: str) -> str:
    return f"<!-- figures: {script} -->"


def add_write(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="put the figures into docs/benchmarks.md")


def finish(
    name: str, figures: Mapping[str, Any], goals: Mapping[str, Any], holds: bool, *, lines: Sequence[str] | None = None
) -> None:
    """Prints {name, figures, goals, holds} as one line of JSON; with `--write` on the command line also writes them.

    lines: of the block; None: a row for each figure.
    """
    print(json.dumps({"name": name, "figures": dict(figures), "goals": dict(goals), "holds": bool(holds)}))
    if "--write" in sys.argv[1:]:
        write_block(PAGE, f"benchmarks/{name}.py", table(figures, goals) if lines is None else lines)


def table(figures: Mapping[str, Any], goals: Mapping[str, Any]) -> list[str]:
    """Markdown rows. A goal's key is a figure's with or without _min or _max."""
    wanted = {}
    for key, goal in goals.items():
        figure = key if key in figures else re.sub("_(min|max)$", "", key)
        sign = {"_min": ">= ", "_max": "<= "}.get(key[-4:], "")
        wanted[figure] = sign + shown(goal)
    rows = ["| figure | value | goal |", "|---|---|---|"]
    return rows + [f"| `{key}` | {shown(value)} | {wanted.get(key, '')} |" for key, value in figures.items()]


def shown(value: Any) -> str:
    """Four significant digits of a float."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def provenance(made_at: str | None = None) -> str:
    """Commit, date, machine, its load, versions and the command that runs now. made_at: the commit that the figures are
    of, where it is not the one that is checked out."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    def checked_out() -> str:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!docs", ":!README.md")
        return git("rev-parse", "--short=7", "HEAD") + (" with local changes" if changed else "")

    commit = made_at or checked_out()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    machine = f"{_processor()}, {len(os.sched_getaffinity(0))} cores"
    if made_at is None:
        machine += f", load {os.getloadavg()[1]:.1f}"
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    command = " ".join(["python", Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix(), *sys.argv[1:]])
    return f"Commit {commit}, {today}, {machine}; {versions}: `{command}`"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.machine()


def write_block(
    page: Path, script: str, lines: Sequence[str], *, made_at: str | None = None, line: str | None = None
) -> None:
    """Replaces the block of `script` in `page`. Raises ValueError where the page has none. line: the provenance of
    figures that were measured on another machine."""
    text, first = page.read_text(), begin(script)
    if first not in text:
        raise ValueError(f"{page} has no line {first!r}: add it, and {END!r} after it")
    start = text.index(first) + len(first)
    body = "\n".join(["", *lines, "", line or provenance(made_at), ""])
    page.write_text(text[:start] + "\n" + body + text[text.index(END, start) :])

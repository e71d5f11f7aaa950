"""Write the last run of the long tier into tests/RESULTS.md: python -m tests.support.results long.xml"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "RESULTS.md"
HEAD = """# Last run of the long tier

Further cases of the slowest tests, which `make test-all` runs beside those of `make test`; every commit passes the
latter. Written by `make test-long`. The long tier of tests/fuzz has its own tables:
[fuzz/RESULTS.md](fuzz/RESULTS.md).

"""


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


def counted(junits: Sequence[Path]) -> dict[str, int]:
    """Cases by outcome, and the seconds of the runs by the clock."""
    counts = Counter(dict.fromkeys(("tests", "failures", "errors", "skipped"), 0))
    seconds = 0.0
    for junit in junits:
        for suite in ET.parse(junit).getroot().iter("testsuite"):
            counts.update({name: int(suite.get(name) or 0) for name in counts})
            seconds += float(suite.get("time") or 0)
    return {**counts, "seconds": round(seconds)}


def main(junits: Sequence[Path]) -> None:
    fuzz = RESULTS.parent / "fuzz" / RESULTS.name
    rows = {"commit": commit(RESULTS, fuzz)} | about() | {k: f"{v:,}" for k, v in counted(junits).items()}
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    RESULTS.write_text(f"{HEAD}| | |\n|---|---|\n{table}", encoding="utf-8")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])

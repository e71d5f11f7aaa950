"""Run the long tier: python -m tests.fuzz [--target NAME ...] [--seed N] [--cases N]

Figures are printed and written into tests/fuzz/RESULTS.md, one table a target. Exit status 1 if a target reports a case
under "failures".
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support import results

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
TARGETS = sorted(p.stem for p in (HERE / "targets").glob("*.py") if p.stem != "__init__")
HEAD = """# Results of the long tier

Each table is the last run of its target, written by `python -m tests.fuzz` (`make fuzz`).
"""


def write_table(target: str, figures: Mapping[str, float | int | str]) -> None:
    """Replace the target's table in RESULTS.md; the others stay."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else HEAD
    tables = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    rows = "".join(f"| {name} | {_shown(value)} |\n" for name, value in figures.items())
    tables[target] = f"\n| | |\n|---|---|\n{rows}"
    body = "".join(f"\n## {name}\n\n{tables[name].strip()}\n" for name in sorted(tables))
    RESULTS.write_text(HEAD + body, encoding="utf-8")


def _shown(value: float | int | str) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else value.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be given more than once; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="default: CASES of each target")
    args = parser.parse_args()
    failures = 0
    for name in args.target or TARGETS:
        target = importlib.import_module(f"tests.fuzz.targets.{name}")
        cases = args.cases if args.cases is not None else target.CASES
        print(f"{name}: {cases:,} cases, seed {args.seed}", flush=True)
        started = time.monotonic()
        figures = target.run(cases, args.seed)
        about = {
            "commit": results.commit(RESULTS, HERE.parent / RESULTS.name),
            **results.about(),
            "seed": str(args.seed),
            "seconds": round(time.monotonic() - started),
        }
        write_table(name, about | dict(figures))
        for key, value in figures.items():
            print(f"  {key}: {_shown(value)}", flush=True)
        failures += int(figures.get("failures", 0))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

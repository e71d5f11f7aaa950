"""Results of cells: lines of results.jsonl, one of each cell, its last."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.faults.cells import Cell, cells, must

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.jsonl")
SOAKS = Path(__file__).with_name("soaks.jsonl")
PRODUCT = ("miles_like", "rollout", "megatron_bridge", "quant", "routing_replay")
Result = dict[str, Any]


def product_commit() -> str:
    """Short hash of the last commit that changed the product, with "+" where the tree differs from it: a commit of
    results, tests or pages leaves results valid."""

    def git(*words: str) -> str:
        return subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", *PRODUCT)
    return (git("log", "-1", "--format=%h", "--", *PRODUCT) or "unknown") + "+" * bool(changed)


def today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def read(path: Path = RESULTS) -> dict[str, Result]:
    """By the names of cells; of those that there still are, in their order."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {line["cell"]: line for line in lines}
    return {cell.name: found[cell.name] for cell in cells() if cell.name in found}


def keep(result: Mapping[str, Any], path: Path = RESULTS) -> None:
    """Replaces the line of its cell. Other programs may do so at the same time."""
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        found = read(path) | {result["cell"]: dict(result)}
        new = path.with_suffix(".new")
        lines = [json.dumps(found[cell.name], ensure_ascii=False) for cell in cells() if cell.name in found]
        new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        new.rename(path)
    finally:
        os.close(directory)


def faults_of(result: Mapping[str, Any]) -> list[str]:
    """What is not as it must be, one phrase each; empty: the cell holds."""
    expected = must(Cell.named(result["cell"]))
    if result.get("broken"):
        return [f"the cell was not played to its end: {result['broken']}"]
    out = []
    if not result["struck"]:
        out.append("the fault did not strike at its moment")
    if result["did"] != expected.outcome:
        out.append(f"it {result['did']}")
    elif expected.outcome != "ends" and tuple(result["replaced"]) != expected.replaced:
        names = [", ".join(parts) or "nothing" for parts in (result["replaced"], expected.replaced)]
        out.append(f"{names[0]} was replaced in place of {names[1]}")
    if expected.outcome == "ends" and result["did"] == "ends" and not result["sentence"]:
        out.append("no sentence was printed")
    if result["ledger"] != "closed":
        out.append(f"ledger: {result['ledger']}")
    if expected.bitwise and result["differs"]:
        out.append(f"not bitwise: {', '.join(result['differs'])}")
    return out


def due(chosen: Sequence[Cell], commit: str, known: Mapping[str, Result]) -> list[Cell]:
    """Cells without a result of this commit in which the fault struck, those that never had one first."""
    stale = [c for c in chosen if not _of(known.get(c.name, {}), commit)]
    return sorted(stale, key=lambda cell: (cell.name in known, known.get(cell.name, {}).get("date", "")))


def _of(result: Mapping[str, Any], commit: str) -> bool:
    return result.get("commit") == commit and bool(result.get("struck"))

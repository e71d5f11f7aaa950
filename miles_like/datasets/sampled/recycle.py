"""The prompts on which a run failed or had few successes, with their rows, for a further run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from miles_like.algorithms.filters import EQUAL_REWARDS
from miles_like.datasets.strata import json_lines
from miles_like.datasets.table import Table

ADDED = ("pass_rate", "samples", "last_step")  # columns of a recycled row


class Visit(NamedTuple):
    """The last time that a prompt's samples were scored."""

    step: int
    passed: int
    samples: int

    @property
    def pass_rate(self) -> float:
        return self.passed / self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Recycled:
    rows: Sequence[dict[str, Any]]  # of the run's files, with the columns ADDED
    visited: int  # prompts that were scored at least once
    unknown: int  # of them, those that the files do not have


def last_visits(run_dir: Path, pass_at: float) -> dict[str, Visit]:
    """Prompt id -> its last visit: from `rollouts/step_N.jsonl`, and from the ledger for groups that a filter discarded
    because all their rewards were -1, 0 or 1. A sample passes with a reward of `pass_at` or more. Raises ValueError for
    a directory without either."""
    files = sorted(run_dir.glob("rollouts/step_*.jsonl"), key=_step_of)
    ledger = run_dir / "ledger.jsonl"
    if not files and not ledger.is_file():
        raise ValueError(f"{run_dir} has neither rollouts/step_N.jsonl nor ledger.jsonl: pass the directory of a run")
    out: dict[str, Visit] = {}

    def add(prompt: str, visit: Visit) -> None:
        if prompt not in out or out[prompt].step <= visit.step:
            out[prompt] = visit

    if ledger.is_file():
        values = {reason: value for value, reason in EQUAL_REWARDS.items()}
        for _, line in json_lines(ledger):
            if "prompt" not in line:  # totals of a step
                continue
            for reason, n in line["discarded"].items():
                if reason in values:
                    add(line["prompt"], Visit(int(line["step"]), n if values[reason] >= pass_at else 0, n))
    for file in files:
        rewards: dict[str, list[float]] = {}
        for _, line in json_lines(file):
            if line.get("reward") is not None and not line.get("row"):  # an episode counts once
                rewards.setdefault(str(line.get("prompt_id")), []).append(float(line["reward"]))
        for prompt, scored in rewards.items():
            add(prompt, Visit(_step_of(file), sum(r >= pass_at for r in scored), len(scored)))
    return out


def recycled(tables: Sequence[Table], visits: Mapping[str, Visit], *, low: float, high: float) -> Recycled:
    """The rows whose prompt had a pass rate of `low` to `high` at its last visit, the hardest first, then in the order
    of the files. Raises ValueError for bounds without a rate between them, and where no visited prompt is in the
    files."""
    if not 0 <= low <= high <= 1:
        raise ValueError(
            f"--min-pass-rate {low:g} and --max-pass-rate {high:g}: pass two numbers from 0 to 1, of which the "
            "first is not larger"
        )
    rows, known = list[tuple[float, dict[str, Any]]](), 0
    for table in tables:
        for item in table.items:
            visit = visits.get(item.prompt.id)
            if visit is None:
                continue
            known += 1
            if low <= visit.pass_rate <= high:
                added = dict(zip(ADDED, (visit.pass_rate, visit.samples, visit.step), strict=True))
                rows.append((visit.pass_rate, {**item.row, "id": item.prompt.id, **added}))
    if visits and not known:
        raise ValueError(
            f"none of the {len(visits)} prompts of the run is in {', '.join(t.path for t in tables)}: restore "
            "the files of the run, and pass the model's directory as --tokenizer"
        )
    rows.sort(key=lambda row: row[0])
    return Recycled(rows=[row for _, row in rows], visited=len(visits), unknown=len(visits) - known)


def _step_of(file: Path) -> int:
    found = re.search(r"(\d+)", file.stem)
    return int(found[1]) if found else 0

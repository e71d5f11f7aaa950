"""Everything that is wrong with a file before a run reads it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_like.datasets.duplicates import find_duplicates
from miles_like.datasets.gold import gold_faults
from miles_like.datasets.leaks import find_leaks
from miles_like.datasets.settings import DataTools
from miles_like.datasets.similarity import exact_threshold
from miles_like.datasets.table import Finding, Table, examined, read_table, readable_rows
from miles_like.protocols import RewardFn
from miles_like.rewards.load import make_reward
from miles_like.storage.completion import write_atomically
from rollout.prompts.config import DataConfig
from rollout.prompts.source import Tokenizer

ROWS, GOLD, CONTRADICTIONS, LEAKS, DUPLICATES = (
    "rows that a run rejects",
    "answers below the full reward",
    "prompts with several answers",
    "rows that are in an eval set",
    "duplicate rows",
)
REPORTED = frozenset({DUPLICATES})  # without being a fault


@dataclass(kw_only=True)
class Examination:
    """found: for each thing that was examined the rows with a fault, in the order of the file. Something that was not
    examined is in `unchecked`, with the reason."""

    path: str
    rows: int
    notes: Sequence[str] = ()
    found: dict[str, list[Finding]] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not any(faults for name, faults in self.found.items() if name not in REPORTED)

    def lines(self, most: int) -> Iterator[str]:
        """A line for each thing examined, and up to `most` of its rows."""
        yield f"{self.path}: {self.rows} rows"
        yield from self.notes
        for name, faults in self.found.items():
            yield f"{name}: {len(faults) or 'none'}"
            yield from (f"  {f}" for f in faults[:most])
            if len(faults) > most:
                yield f"  and {len(faults) - most} more (--shown, --json)"
        for name, why in self.unchecked.items():
            yield f"{name}: not checked, {why}"

    def as_json(self) -> dict[str, Any]:
        found = {k: [{"place": f.place, "text": f.text} for f in v] for k, v in self.found.items()}
        return {"path": self.path, "rows": self.rows, "ok": self.ok, "found": found, "not_checked": self.unchecked}

    def write_json(self, path: Path) -> None:
        write_atomically(path, json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n")


def examine_file(
    path: str,
    settings: DataTools,
    *,
    tokenizer: Tokenizer | None = None,
    held: Mapping[str, str],
    threshold: float,
    full: float = 1.0,
    form: str | None = None,
) -> Examination:
    """Examines a file with the columns, the template and the reward of `settings`. held: name -> file of each eval set;
    full, form: as of `gold_faults`. Raises ValueError for a file of which no row can be read, a faulty eval set, and an
    unknown reward."""
    exact_threshold(threshold)
    reward = None if settings.reward is None else make_reward(settings.reward, sandbox=settings.sandbox)
    tables = {name: read_table(file, settings.data) for name, file in held.items()}
    return asyncio.run(_examine(path, settings.data, tokenizer, reward, tables, threshold, full=full, form=form))


async def _examine(
    path: str,
    config: DataConfig,
    tokenizer: Tokenizer | None,
    reward: RewardFn | None,
    held: Mapping[str, Table],
    threshold: float,
    *,
    full: float,
    form: str | None,
) -> Examination:
    rows, broken = readable_rows(path)
    needs_answers = reward is not None and reward.compares is not None
    table, refused = examined(rows, config, tokenizer, answers=needs_answers)
    out = Examination(path=path, rows=len(rows) + len(broken), notes=table.columns.notes)
    out.found[ROWS] = [*broken, *refused]
    items = table.items

    def at(i: int, text: str) -> Finding:
        return Finding(items[i].place, text)

    if reward is None:
        out.unchecked[GOLD] = "no reward is set: pass --reward NAME, or the --config of a run"
    else:
        out.found[GOLD] = [at(*fault) for fault in await gold_faults(items, reward, full=full, form=form)]
    found = find_duplicates(items, threshold)
    out.found[CONTRADICTIONS] = [
        at(rows[0], f"the same prompt has a different answer at {', '.join(items[i].place for i in rows[1:])}")
        for rows in found.contradictions
    ]
    if held:
        leaks = find_leaks(table, held, threshold)
        out.found[LEAKS] = [at(leak.item, str(leak)) for leak in leaks]
    else:
        out.unchecked[LEAKS] = "no eval set is set: pass --against FILE, or the --config of a run"
    out.found[DUPLICATES] = [
        at(d.item, f"repeats {items[d.kept].place}" + ("" if d.exact else f" (similarity {d.jaccard:.2f})"))
        for d in found.removed
    ]
    return out

"""Checks a `ledger.jsonl` alone: every issued sample was trained once or discarded once.

Each line is checked against all lines before it, and the totals are counted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_like.limits.regular_files import parse_json, read_regular

LEDGER_BYTES = 1 << 32  # largest file that is read
_GROUP_KEYS = {"step", "ticket", "prompt", "trained", "discarded"}
_BACK_KEYS = {"step", "to", "rolled_back"}
ROLLED_BACK = "rolled back"  # the reason of samples that were trained, or open, in steps that the run went back over
_SAMPLES = ("issued", "trained", "discarded", "in_flight")
_TOTALS_KEYS = {"step", "tickets", *_SAMPLES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Totals from the start of the run to the end of a step; samples, except for `groups`."""

    step: int
    groups: int  # issued
    issued: int
    trained: int
    discarded: int
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    wrong: str | None  # a sentence about the first wrong line; all other fields are of the lines before it
    steps: tuple[Totals, ...]  # ascending
    kept: tuple[Totals, ...]  # of these, without steps that the run went back over
    reasons: Mapping[str, int]  # reason -> samples discarded up to the last of `steps`, the most frequent first
    unfinished: int  # lines after the last totals, of a step in which the run was killed


def audit(path: Path) -> Audit:
    """Reads the whole file. Lines at the end that a killed run leaves (those of a step without its totals, and a line
    cut short) are no error; a resumed run removes them. Raises OSError where there is no such file, and
    ValueError for one of more than LEDGER_BYTES or that is not a regular file."""
    reader = _Reader()
    wrong = None
    lines = read_regular(path, LEDGER_BYTES).split(b"\n")
    cut_off = bool(lines.pop())  # a complete line ends in a newline
    for number, line in enumerate(lines, 1):
        try:
            reader.read(line)
        except ValueError as e:
            wrong = f"{path} line {number}: {e}"
            break
    return Audit(
        wrong=wrong,
        steps=tuple(reader.steps),
        kept=tuple(reader.kept),
        reasons=dict(reader.reasons_at_totals.most_common()),
        unfinished=0 if wrong else len(reader.since) + (reader.went_back is not None) + cut_off,
    )


@dataclass
class _Reader:
    closed: set[int] = field(default_factory=set)  # group ids
    trained: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    steps: list[Totals] = field(default_factory=list)
    kept: list[Totals] = field(default_factory=list)
    reasons_at_totals: Counter[str] = field(default_factory=Counter)  # `reasons` at the last of `steps`
    went_back: int | None = None  # step of a line of this kind after the last totals
    since: list[Mapping[str, Any]] = field(default_factory=list)  # lines of groups after the last totals

    def read(self, line: bytes) -> None:
        """Read the next line. Raises ValueError for a wrong line and leaves the reader unchanged."""
        try:
            row = parse_json(line)
        except ValueError as e:
            raise ValueError(f"it is damaged ({e})") from None
        if not isinstance(row, dict):
            raise ValueError(f"it is a {type(row).__name__}, expected an object")
        if row.keys() - {"rows"} == _GROUP_KEYS:
            self._group(row)
        elif row.keys() == _BACK_KEYS and all(_is_count(v) for v in row.values()):
            self._back(row["step"], row["to"], row["rolled_back"])
        elif row.keys() == _TOTALS_KEYS and all(_is_count(v) for v in row.values()):
            self._totals(Totals(step=row["step"], groups=row["tickets"], **{name: row[name] for name in _SAMPLES}))
        else:
            raise ValueError(
                f"it is neither a group's line nor a step's totals: it has the keys {', '.join(sorted(row))}"
            )

    def _group(self, row: Mapping[str, Any]) -> None:
        step, group_id, trained, discarded = row["step"], row["ticket"], row["trained"], row["discarded"]
        last = self.steps[-1].step if self.steps else -1
        if not (_is_count(group_id) and _is_count(step) and isinstance(row["prompt"], str)):
            raise ValueError(
                f"step {step!r}, group {group_id!r}, prompt {row['prompt']!r}: expected two counts and a prompt id"
            )
        if not (isinstance(trained, list) and all(map(_is_count, trained)) and trained == sorted(set(trained))):
            raise ValueError(
                f"group {group_id} has trained = {trained!r}: expected sample indices, ascending, without duplicates"
            )
        if not (isinstance(discarded, dict) and all(_is_count(n) and n > 0 for n in discarded.values())):
            raise ValueError(
                f"group {group_id} has discarded = {discarded!r}: expected a count of at least 1 for each reason"
            )
        rows = row.get("rows", {})
        known = {str(i) for i in trained}
        if not (isinstance(rows, dict) and set(rows) <= known and all(_is_count(n) and n > 1 for n in rows.values())):
            raise ValueError(
                f"group {group_id} has rows = {rows!r}: expected a count of at least 2 by the index of a trained sample"
            )
        samples = len(trained) + sum(discarded.values())
        if not samples or (trained and trained[-1] >= samples):
            raise ValueError(f"group {group_id} has {samples} samples, of which {trained} were trained: some are lost")
        if group_id in self.closed:
            raise ValueError(f"group {group_id} is closed a second time: its samples were already trained or discarded")
        # where the prompts have ended, the remaining groups are discarded after the last step
        if step < last or (step == last and trained) or (self.since and step != self.since[-1]["step"]):
            raise ValueError(f"group {group_id} of step {step} comes after lines of step {_last(self.since, last)}")
        if self.went_back is not None:
            raise ValueError(f"group {group_id} comes after the line with which step {step} goes back")
        if self.since and group_id < self.since[-1]["ticket"]:
            raise ValueError(f"group {group_id} comes after group {self.since[-1]['ticket']} of the same step")
        self.closed.add(group_id)
        self.trained += len(trained)
        self.reasons.update(discarded)
        self.since.append(row)

    def _back(self, step: int, to: int, samples: int) -> None:
        """The run goes back to step `to`: the samples trained since then count as discarded."""
        left = [one for one in self.kept if one.step <= to]
        last = self.steps[-1].step if self.steps else -1
        known = left[-1].step == to if left else not to
        if step <= last or not known or (self.since and self.since[-1]["step"] != step):
            raise ValueError(f"step {step} goes back to step {to}, which is not one of the steps before it")
        if samples != self.trained - (left[-1].trained if left else 0):
            raise ValueError(
                f"step {step} goes back over {samples} samples, but {self.trained} were trained so far, and "
                f"{left[-1].trained if left else 0} until step {to}"
            )
        self.kept = left
        self.trained -= samples
        self.reasons[ROLLED_BACK] += samples
        self.went_back = step

    def _totals(self, row: Totals) -> None:
        before = (
            self.steps[-1] if self.steps else Totals(step=0, groups=0, issued=0, trained=0, discarded=0, in_flight=0)
        )
        here = _last(self.since, row.step if self.went_back is None else self.went_back)
        again = row.step == before.step and bool(self.since)  # the groups discarded after the last step
        if row.step != here or (self.steps and row.step <= before.step and not again):
            raise ValueError(f"the totals of step {row.step} come after lines of step {_last(self.since, before.step)}")
        counted = {"trained": self.trained, "discarded": self.reasons.total()}
        for name, count in counted.items():
            if getattr(row, name) != count:
                raise ValueError(f"step {row.step} has {getattr(row, name)} samples {name}, but its lines have {count}")
        if row.issued != row.trained + row.discarded + row.in_flight:
            raise ValueError(
                f"step {row.step}: {row.issued} issued is not {row.trained} trained + {row.discarded} discarded + "
                f"{row.in_flight} in flight"
            )
        waiting = row.groups - len(self.closed)
        if waiting < 0 or row.in_flight < waiting or (row.in_flight and not waiting):
            raise ValueError(
                f"step {row.step}: {row.in_flight} samples in flight do not fit {waiting} open groups "
                f"({row.groups} issued, {len(self.closed)} closed)"
            )
        unknown = [line["ticket"] for line in self.since if line["ticket"] >= row.groups]
        if unknown:
            raise ValueError(f"step {row.step} issued {row.groups} groups, but closed group {unknown[0]}")
        if row.groups < before.groups or row.issued < before.issued:
            raise ValueError(
                f"step {row.step}: {row.groups} groups of {row.issued} samples, fewer than the {before.groups} of "
                f"{before.issued} before"
            )
        self.steps.append(row)
        self.kept.append(row)
        self.went_back = None
        self.reasons_at_totals = self.reasons.copy()
        self.since.clear()


def _last(since: Iterable[Mapping[str, Any]], otherwise: int) -> int:
    return next((int(line["step"]) for line in since), otherwise)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0

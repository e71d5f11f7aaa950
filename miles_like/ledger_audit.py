"""`ledger.jsonl` read alone: whether every sample issued was trained once or discarded once.

Nothing is taken on trust: each line is held to all that came before, and the totals are counted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_like.regular_files import parse_json, read_regular

LEDGER_BYTES = 1 << 32  # the most that is read
_TICKET = {"step", "ticket", "prompt", "trained", "discarded"}
_TOTALS = ("tickets", "issued", "trained", "discarded", "in_flight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Since the run began, when a step was done. Samples, but for `tickets`."""

    step: int
    tickets: int  # issued
    issued: int
    trained: int
    discarded: int
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    wrong: str | None  # the first line that does not fit, in a sentence; all else is of the lines before it
    steps: tuple[Totals, ...]  # ascending
    reasons: Mapping[str, int]  # why samples were discarded until the last of them, the commonest first
    unfinished: int  # lines after the last step's totals: of a step in which the run was killed


def audit(path: Path) -> Audit:
    """Reads all of it. What a kill leaves at the end, the lines of a step without its totals and one that is cut off,
    is no fault; a resumed run cuts it away. Raises OSError where there is no such file."""
    book = _Book()
    wrong = None
    lines = read_regular(path, LEDGER_BYTES).split(b"\n")
    cut_off = bool(lines.pop())  # a whole line ends in a newline
    for number, line in enumerate(lines, 1):
        try:
            book.read(line)
        except ValueError as e:
            wrong = f"{path} line {number}: {e}"
            break
    return Audit(
        wrong=wrong,
        steps=tuple(book.steps),
        reasons=dict(book.told.most_common()),
        unfinished=0 if wrong else len(book.since) + cut_off,
    )


@dataclass
class _Book:
    closed: set[int] = field(default_factory=set)  # tickets
    trained: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    steps: list[Totals] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)  # `reasons` as of the last of `steps`
    since: list[Mapping[str, Any]] = field(default_factory=list)  # lines of tickets without a step's totals yet

    def read(self, line: bytes) -> None:
        """Raises ValueError where the line does not fit, and is then as it was."""
        try:
            row = parse_json(line)
        except ValueError as e:
            raise ValueError(f"it is damaged ({e})") from None
        if not isinstance(row, dict):
            raise ValueError(f"it holds {type(row).__name__} where an object was expected")
        if row.keys() == _TICKET:
            self._ticket(row)
        elif row.keys() == {"step", *_TOTALS} and all(_count(v) for v in row.values()):
            self._totals(Totals(**row))
        else:
            raise ValueError(f"it is neither of a ticket nor of a step's totals: it holds {', '.join(sorted(row))}")

    def _ticket(self, row: Mapping[str, Any]) -> None:
        step, ticket, trained, discarded = row["step"], row["ticket"], row["trained"], row["discarded"]
        last = self.steps[-1].step if self.steps else -1
        if not (_count(ticket) and _count(step) and isinstance(row["prompt"], str)):
            raise ValueError(f"step {step!r}, ticket {ticket!r}, prompt {row['prompt']!r}: want two counts and a name")
        if not (isinstance(trained, list) and all(map(_count, trained)) and trained == sorted(set(trained))):
            raise ValueError(
                f"ticket {ticket} has trained = {trained!r}: want indices of samples, ascending, each once"
            )
        if not (isinstance(discarded, dict) and all(_count(n) and n > 0 for n in discarded.values())):
            raise ValueError(f"ticket {ticket} has discarded = {discarded!r}: want a count from 1 for each reason")
        samples = len(trained) + sum(discarded.values())
        if not samples or (trained and trained[-1] >= samples):
            raise ValueError(f"ticket {ticket} has {samples} samples, of which {trained} were trained: some are lost")
        if ticket in self.closed:
            raise ValueError(f"ticket {ticket} is closed a second time: its samples were trained or discarded before")
        # where the prompts have ended, what is left over is discarded after the last step
        if step < last or (step == last and trained) or (self.since and step != self.since[-1]["step"]):
            raise ValueError(f"ticket {ticket} is of step {step}, after lines of step {_last(self.since, last)}")
        if self.since and ticket < self.since[-1]["ticket"]:
            raise ValueError(f"ticket {ticket} comes after ticket {self.since[-1]['ticket']} of the same step")
        self.closed.add(ticket)
        self.trained += len(trained)
        self.reasons.update(discarded)
        self.since.append(row)

    def _totals(self, row: Totals) -> None:
        before = self.steps[-1] if self.steps else Totals(**dict.fromkeys(("step", *_TOTALS), 0))
        here = _last(self.since, row.step)
        again = row.step == before.step and bool(self.since)  # of what was left over
        if row.step != here or (self.steps and row.step <= before.step and not again):
            raise ValueError(f"totals of step {row.step} after lines of step {_last(self.since, before.step)}")
        counted = {"trained": self.trained, "discarded": self.reasons.total()}
        for name, count in counted.items():
            if getattr(row, name) != count:
                raise ValueError(f"step {row.step} says {getattr(row, name)} samples {name}, its lines say {count}")
        if row.issued != row.trained + row.discarded + row.in_flight:
            raise ValueError(
                f"step {row.step}: {row.issued} issued is not {row.trained} trained + {row.discarded} discarded + "
                f"{row.in_flight} in flight"
            )
        waiting = row.tickets - len(self.closed)
        if waiting < 0 or row.in_flight < waiting or (row.in_flight and not waiting):
            raise ValueError(
                f"step {row.step}: {row.in_flight} samples in flight of {waiting} tickets ({row.tickets} issued, "
                f"{len(self.closed)} closed)"
            )
        unknown = [line["ticket"] for line in self.since if line["ticket"] >= row.tickets]
        if unknown:
            raise ValueError(f"step {row.step} issued {row.tickets} tickets and closed ticket {unknown[0]}")
        if row.tickets < before.tickets or row.issued < before.issued:
            raise ValueError(
                f"step {row.step}: {row.tickets} tickets of {row.issued} samples, fewer than the {before.tickets} of "
                f"{before.issued} before"
            )
        self.steps.append(row)
        self.told = self.reasons.copy()
        self.since.clear()


def _last(since: Iterable[Mapping[str, Any]], otherwise: int) -> int:
    return next((int(line["step"]) for line in since), otherwise)


def _count(value: object) -> bool:
    return type(value) is int and value >= 0

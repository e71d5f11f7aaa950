"""The table of an examination, the remedies, and the file with everything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from miles_like.check_results import Outcome
from miles_like.doctor.examine import Examination
from miles_like.doctor.findings import Finding
from miles_like.nodes.facts import Unanswered

_STYLE = {Outcome.OK: "green", Outcome.WRONG: "bold red", Outcome.NOT_CHECKED: "yellow"}


def print_examination(console: Console, examined: Examination) -> None:
    """The table, then one line for each fault and each remark."""
    table = Table("check", "where", "found", "", highlight=False)
    for finding in examined.findings:
        where = _where(finding, len(examined.reports))
        outcome = f"[{_STYLE[finding.outcome]}]{finding.outcome}[/]"
        table.add_row(escape(finding.check), escape(where), escape(finding.found), outcome)
    console.print(table)
    for kind, lines in (("wrong", _texts(examined, Outcome.WRONG)), ("remark", _texts(examined, Outcome.OK))):
        for line in lines:
            style = "bold red" if kind == "wrong" else "bold"
            console.print(f"[{style}]{kind}:[/] {escape(line)}", soft_wrap=True, highlight=False)
    wrong = sum(f.outcome is Outcome.WRONG for f in examined.findings)
    console.print(f"{len(examined.reports)} nodes examined: {wrong or 'no'} faults")


def write_examination(path: Path, examined: Examination) -> None:
    """JSON: ok, findings, and what was measured of each node, clock and pair."""
    links = [
        {"backend": link.backend, "ends": link.ends}
        | ({"error": link.result.why} if isinstance(link.result, Unanswered) else asdict(link.result))
        for link in examined.links
    ]
    value = {
        "ok": examined.ok,
        "findings": [asdict(finding) for finding in examined.findings],
        "nodes": examined.reports,
        "clocks": {node: asdict(clock) for node, clock in examined.clocks.items()},
        "links": links,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def _where(finding: Finding, number: int) -> str:
    if len(finding.where) == number > 2:
        return f"all {number} nodes"
    return ", ".join(finding.where)


def _texts(examined: Examination, outcome: Outcome) -> Iterator[str]:
    yield from dict.fromkeys(f.text for f in examined.findings if f.outcome is outcome and f.text)

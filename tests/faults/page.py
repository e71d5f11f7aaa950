"""The section of docs/reliability.md that follows from results.jsonl and soaks.jsonl: python -m tests.faults.page"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.faults import record
from tests.faults.cells import KINDS, MOMENTS, OUTCOMES, ROLES, SIGNALS, Cell, cells, left_out, must
from tests.faults.peers import PEERS
from tests.faults.record import Result

PAGE = record.ROOT / "docs" / "reliability.md"
BEGIN = "<!-- written by python -m tests.faults.page -->"
END = "<!-- end of what is written -->"


def write(path: Path = PAGE) -> None:
    """Writes the section between its two marks; the rest of the page stays."""
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


def renewed(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{section(record.read(), soaks())}\n{END}{after}"


def soaks() -> list[Result]:
    """The last soak of each length."""
    if not record.SOAKS.exists():
        return []
    return [json.loads(line) for line in record.SOAKS.read_text(encoding="utf-8").splitlines()]


def section(results: Mapping[str, Result], soaked: Sequence[Result]) -> str:
    return "\n\n".join(filter(None, _parts(results, soaked)))


def _parts(results: Mapping[str, Result], soaked: Sequence[Result]) -> Iterator[str]:
    wrong = {name: faults for name, r in results.items() if (faults := record.faults_of(r))}
    commits = Counter(f"{r['commit']} of {r['date']}" for r in results.values())
    of = ", ".join(f"{n} at {commit}" for commit, n in sorted(commits.items()))
    yield (
        f"{len(cells())} cells, {len(results)} played, {len(results) - len(wrong)} of them as they must be ({of}). "
        "A cell says what happened and the seconds from the fault to the end of the step that was under way, with what "
        "was trained again in between; `!`: not as it must be; `–`: not played yet. All but those marked `≠` end bit "
        "for bit as the undisturbed run. Where ranks are rebuilt or a server is replaced, all other processes of the "
        "run are the same before and after."
    )
    for signal in SIGNALS:
        yield f"### {signal}\n\n" + _table(
            ["role", *MOMENTS],
            ([role, *(_shown(Cell(role, moment, signal), results, wrong) for moment in MOMENTS)] for role in ROLES),
        )
    others = [cell for cell in cells() if cell.kind not in SIGNALS]
    order = list(KINDS)
    yield "### Other faults\n\nAny two of role, moment and kind meet in a cell.\n\n" + _table(
        ["fault", "role", "moment", "what happened"],
        (
            [c.kind, c.role, c.moment, _shown(c, results, wrong)]
            for c in sorted(others, key=lambda c: order.index(c.kind))
        ),
    )
    if wrong:
        yield "### Not as it must be\n\n" + _table(
            ["cell", "must", "what happened"],
            ([name, must(Cell.named(name)).outcome, _told(results[name], faults)] for name, faults in wrong.items()),
        )
    words = [*OUTCOMES.items(), *ROLES.items(), *MOMENTS.items(), *KINDS.items()]
    yield "### Words\n\n" + _table(["word", "meaning"], words)
    yield "### Not played\n\n" + _table(["role", "fault", "why"], ([*row] for row in left_out()))
    yield "### Fault tests of other projects\n\n" + _table(["project", "test", "requires", "here"], PEERS)
    if soaked:
        yield "### Soak\n\n" + _table(["", *(f"{s['minutes']:g} minutes" for s in soaked)], _soak_rows(soaked))


def _shown(cell: Cell, results: Mapping[str, Result], wrong: Mapping[str, Sequence[str]]) -> str:
    if (result := results.get(cell.name)) is None:
        return "–"
    did = str(result.get("did", "not played to its end")).partition(";")[0]
    seconds = "" if result.get("seconds") is None else f", {result['seconds']:g} s"
    return f"{did}{seconds}" + " ≠" * bool(result.get("differs")) + " !" * (cell.name in wrong)


def _told(result: Result, faults: Sequence[str]) -> str:
    printed = result.get("sentence", "")
    return "; ".join(faults) + (f" (it printed: {printed})" if printed else "")


def _soak_rows(soaked: Sequence[Result]) -> Iterator[list[str]]:
    for key in dict.fromkeys(key for s in soaked for key in s if key != "minutes"):
        yield [key, *(str(s.get(key, "")) for s in soaked)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cell(x) for x in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    write()

"""Spans in Chrome's trace event format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open: complete
events ("X") in microseconds, a process for each process and a thread for each row that is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from miles_like.limits.regular_files import MIB, parse_json, read_regular, replace_bytes
from miles_like.report.traces.parts import TracedSpan

_BYTES = 1024 * MIB


def rows(spans: Sequence[TracedSpan]) -> list[tuple[str, TracedSpan]]:
    """Each span of one process with the name of the row that shows it: phases one within the other; of spans beside
    each other, the first row of their name that is free."""
    out: list[tuple[str, TracedSpan]] = []
    open_: dict[str, list[list[int]]] = {}  # kind -> row -> ends of the spans that are open there
    for span in sorted(spans, key=lambda s: (s.start, -s.took)):
        kind = span.name if span.beside else "phases"
        number = _row(open_.setdefault(kind, []), span)
        out.append((kind if not number else f"{kind} {number + 1}", span))
    return out


def _row(open_: list[list[int]], span: TracedSpan) -> int:
    """The number of the first row with room for a span, which is then open there."""
    for number, ends in enumerate(open_):
        while ends and ends[-1] <= span.start:
            ends.pop()
        if not ends or (not span.beside and span.end <= ends[-1]):
            ends.append(span.end)
            return number
    open_.append([span.end])
    return len(open_) - 1


def trace_events(spans: Sequence[TracedSpan], about: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file."""
    processes: dict[tuple[str, int], list[TracedSpan]] = {}
    for span in spans:
        processes.setdefault((span.process, span.pid), []).append(span)
    events: list[dict[str, Any]] = []
    for number, ((process, pid), own) in enumerate(sorted(processes.items(), key=_order), 1):
        name = {"name": f"{process} ({pid})"}
        events.append({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": name})
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
        )
        placed = rows(own)
        threads = {row: i for i, row in enumerate(sorted({row for row, _ in placed}, key=_row_order), 1)}
        for row, tid in threads.items():
            events.append({"ph": "M", "name": "thread_name", "pid": number, "tid": tid, "args": {"name": row}})
        for row, span in placed:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "pid": number,
                    "tid": threads[row],
                    "ts": span.start // 1000,
                    "dur": span.took / 1000,
                    "args": span.args,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def write_trace(path: Path, spans: Sequence[TracedSpan], about: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, orjson.dumps(trace_events(spans, about)))


def read_trace(path: Path) -> list[TracedSpan]:
    """The spans of a file that `write_trace` wrote. Raises ValueError for another one."""
    found = parse_json(read_regular(path, _BYTES))
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        raise ValueError(f"{path} is not a trace: it has no traceEvents")
    names, out = dict[int, str](), list[TracedSpan]()
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event.get("ph") == "X":
            process, _, pid = names.get(event["pid"], " (0)").rpartition(" (")
            start, took = int(event["ts"]) * 1000, int(event["dur"] * 1000)
            out.append(
                TracedSpan(
                    process=process,
                    pid=int(pid.rstrip(")")),
                    name=event["name"],
                    start=start,
                    took=took,
                    beside=False,
                    args=event.get("args", {}),
                )
            )
    return out


def _order(item: tuple[tuple[str, int], list[TracedSpan]]) -> tuple[bool, str, int]:
    (process, pid), _ = item
    return process != "driver", process, pid


def _row_order(row: str) -> tuple[bool, int, str]:
    return not row.startswith("phases"), len(row), row

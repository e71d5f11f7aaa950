"""Spans of several processes as files that Perfetto opens: rows, clocks of other nodes, windows, what is sent on."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_like import spans
from miles_like.config.sections.watched.tracing import TraceConfig
from miles_like.report.traces.chrome import read_trace, rows, trace_events, write_trace
from miles_like.report.traces.clocks import NodeClocks, measure
from miles_like.report.traces.parts import Parts, TracedSpan
from miles_like.report.traces.writer import TraceWriter, parts_of, trace_files, with_samples
from tests.support.otlp_collector import collector


@pytest.fixture(autouse=True)
def nothing_is_recorded() -> Iterator[None]:
    yield
    spans.end()


def made(start: int, took: int, **keys: Any) -> TracedSpan:
    given: dict[str, Any] = {"process": "driver", "pid": 1, "name": "a", "beside": False, "args": {}} | keys
    return TracedSpan(start=start, took=took, **given)


# ---- what a process records


def test_nothing_is_recorded_before_a_recording_begins(tmp_path: Path) -> None:
    with spans.span("a", x=1) as one:
        one.add(y=2)
    spans.ended("b", 1.0)
    spans.flush()
    assert one is spans.span("c") and not spans.on() and one.args == {}
    spans.begin(tmp_path, "driver")
    assert spans.on() and not list(tmp_path.iterdir())


def test_a_span_has_its_time_arguments_and_error(tmp_path: Path) -> None:
    spans.begin(tmp_path, "driver")
    before = time.time_ns()
    with pytest.raises(KeyError), spans.beside("a", version=3) as one:
        one.add(samples=["p/0"])
        time.sleep(0.01)
        raise KeyError
    spans.flush()
    (found,) = Parts(tmp_path, lambda host: 0).new()
    assert (found.process, found.pid, found.name, found.beside) == ("driver", os.getpid(), "a", True)
    assert found.args == {"version": 3, "samples": ["p/0"], "error": "KeyError"}
    assert before <= found.start and found.took >= 10_000_000 and found.end <= time.time_ns()


def test_spans_of_a_process_that_ends_are_in_its_file(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from miles_like import spans as s; s.begin(Path(sys.argv[1]), 'x')\n"
    subprocess.run([sys.executable, "-c", code + "with s.span('a'): pass", str(tmp_path)], check=True)
    assert [span.name for span in Parts(tmp_path, lambda host: 0).new()] == ["a"]


test_spans_of_a_process_that_ends_are_in_its_file = pytest.mark.slow(test_spans_of_a_process_that_ends_are_in_its_file)


def test_a_disk_that_is_full_ends_the_recording_alone(tmp_path: Path) -> None:
    spans.begin(tmp_path / "file" / "parts", "driver")
    (tmp_path / "file").write_text("")
    with spans.span("a"):
        pass
    spans.flush()
    assert not spans.on()


def test_a_line_that_is_half_written_comes_with_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "driver.7.jsonl"
    path.write_text('{"process": "driver", "pid": 7, "host": "n0"}\n["a", 1000, 50, false, {}]\n["b", 20')
    parts = Parts(tmp_path, {"n0": 100}.__getitem__)
    assert [(s.name, s.start) for s in parts.new()] == [("a", 900)]
    with path.open("a") as file:
        file.write("00, 5, false, {}]\n")
    assert [(s.name, s.start) for s in parts.new()] == [("b", 1900)] and parts.new() == []


# ---- clocks


@pytest.mark.parametrize("seed", range(5))
def test_the_offset_of_a_clock_lies_within_its_bound(seed: int) -> None:
    """Whatever each way takes, and however unlike the two ways are."""
    draw, now, ahead = random.Random(seed), itertools.count(), 5_000_000
    at = [0]

    def ask() -> tuple[str, int]:
        at[0] += draw.randrange(1_000, 2_000_000)
        there = at[0] + ahead
        at[0] += draw.randrange(1_000, 2_000_000)
        return "n1", there

    host, offset = measure(ask, lambda: next(now) * 0 + at[0])
    assert host == "n1" and abs(offset.ahead - ahead) <= offset.error < 1_500_000


def test_a_node_that_does_not_answer_keeps_its_offset() -> None:
    answers: list[Any] = [("n1", time.time_ns() + 10**12)] * 8

    def ask() -> tuple[str, int]:
        if not answers:
            raise RuntimeError("no answer")
        found: tuple[str, int] = answers.pop()
        return found

    clocks = NodeClocks("n0", [ask])
    clocks.measure()
    first = clocks.ahead("n1")
    clocks.measure()
    assert clocks.ahead("n1") == first == pytest.approx(10**12, abs=10**9)
    assert (clocks.ahead("n0"), clocks.ahead("n2")) == (0, 0)


# ---- files


def of(intervals: Sequence[tuple[int, int]], beside: bool) -> list[TracedSpan]:
    return [made(start, took, beside=beside) for start, took in intervals]


INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30)


@given(INTERVALS, st.booleans())
def test_a_row_never_shows_two_spans_that_cross(intervals: list[tuple[int, int]], beside: bool) -> None:
    """Perfetto drops what crosses. Phases may lie within each other; what runs beside each other does not share."""
    placed: dict[str, list[TracedSpan]] = {}
    for row, span in rows(of(intervals, beside)):
        placed.setdefault(row, []).append(span)
    assert sum(map(len, placed.values())) == len(intervals)
    for found in placed.values():
        for a, b in itertools.combinations(found, 2):
            apart = a.end <= b.start or b.end <= a.start
            within = (a.start <= b.start and b.end <= a.end) or (b.start <= a.start and a.end <= b.end)
            assert apart or (within and not beside)


def test_a_file_is_what_chrome_documents(tmp_path: Path) -> None:
    """Complete events with ts and dur in microseconds, and the names of processes and threads as metadata (Trace Event
    Format, Google, 2016)."""
    found = [
        made(5_000_000, 3_000, args={"version": 2}),
        made(5_001_000, 1_000, process="trainer_rank0", pid=9, name="train", beside=True),
    ]
    content = trace_events(found, {"steps": [1, 2]})
    complete = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"], e["name"], e["args"]) for e in complete] == [
        (5000, 3.0, "a", {"version": 2}),
        (5001, 1.0, "train", {}),
    ]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    assert [names[e["pid"], e["tid"]] for e in complete] == ["phases", "train"]
    processes = [e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["driver (1)", "trainer_rank0 (9)"]
    write_trace(tmp_path / "a.json", found, {})
    again = read_trace(tmp_path / "a.json")
    assert [(s.process, s.pid, s.name, s.start, s.took) for s in again] == [
        (s.process, s.pid, s.name, s.start, s.took) for s in found
    ]


def test_a_window_has_what_began_in_its_steps(tmp_path: Path) -> None:
    """A window is written once the next step has ended; the end writes the rest, also what began before any step."""
    said: list[str] = []
    sent: list[int] = []

    class Export:
        def send(self, found: Sequence[TracedSpan]) -> None:
            sent.append(len(found))
            raise RuntimeError("the collector is away")

    writer = TraceWriter(TraceConfig(on=True, window=2, otlp="http://h"), tmp_path, said.append, Export())
    writer.start()
    for step in range(6):
        with spans.span(f"of step {step}"):
            pass
        writer.write(step, {})
        time.sleep(0.002)
    writer.end()
    found = {path.name: [s.name for s in read_trace(path)] for path in trace_files(tmp_path)}
    assert found == {
        "steps_000001-000002.json": ["of step 0", "of step 1", "of step 2"],
        "steps_000003-000004.json": ["of step 3", "of step 4"],
        "steps_000005-000005.json": ["of step 5"],
    }
    assert sent == [3, 2, 1] and said == ["traces: the collector is away; the run goes on"]
    assert not spans.on() and not parts_of(tmp_path).exists(), "the files have them"


def test_what_a_killed_start_left_is_written_by_the_next(tmp_path: Path) -> None:
    spans.begin(parts_of(tmp_path), "driver")
    with spans.span("before"):
        pass
    spans.flush()
    spans.end()
    writer = TraceWriter(TraceConfig(on=True), tmp_path, print)
    writer.start()
    (left,) = (tmp_path / "traces").glob("until_*.json")
    assert [s.name for s in read_trace(left)] == ["before"]
    writer.write(4, {})  # resumed after step 3
    writer.end()
    writer.start()
    writer.write(4, {})  # again
    writer.end()
    assert [p.name for p in trace_files(tmp_path)] == ["steps_000004-000004.json", "steps_000004-000004_2.json"]


def test_spans_of_servers_get_the_samples_of_their_requests() -> None:
    found = [
        made(0, 9, name="request", args={"rids": ["r1", "r2"], "samples": ["p/0", "p/1"]}),
        made(1, 5, process="rollout_server0", name="generate", args={"rids": ["r1"]}),
        made(1, 5, process="rollout_server1", name="generate", args={"rids": ["other"]}),
    ]
    assert [s.args.get("samples") for s in with_samples(found)[1:]] == [["p/0", "p/1"], []]


def test_a_collector_gets_the_same_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP, by OTLP's own messages: names, times, attributes; a process is an instance of the service. A span that
    is sent again has its number."""
    from miles_like.report.traces.otlp import otlp_export

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue")
    found = [
        made(5_000, 3_000, args={"version": 2, "samples": ["p/0", "p/1"], "none": None}),
        made(6_000, 1_000, process="trainer_rank0", pid=9, name="train"),
    ]
    with collector() as there:
        export = otlp_export(tmp_path, there.url)
        export.send(found)
        assert [(s.instance, s.name, s.start, s.end) for s in there.spans] == [
            ("driver.1", "a", 5_000, 8_000),
            ("trainer_rank0.9", "train", 6_000, 7_000),
        ]
        assert there.spans[0].attributes == {"version": 2, "samples": ["p/0", "p/1"], "none": "None"}
        assert there.headers[0]["x-team"] == "blue"
        export.send(found)
        assert len(there.spans) == 4 and len({s.number for s in there.spans}) == 2
        assert len({s.trace for s in there.spans}) == 1
        there.status = 400
        with pytest.raises(RuntimeError, match="the collector did not take 2 of 2 spans"):
            export.send(found)


def test_each_line_of_a_part_is_json(tmp_path: Path) -> None:
    """Also with arguments that are of no JSON type."""
    spans.begin(tmp_path, "driver")
    with spans.span("a", path=Path("/x"), version=float("inf")):
        pass
    spans.flush()
    (path,) = tmp_path.glob("*.jsonl")
    assert [type(json.loads(line)) for line in path.read_text().splitlines()] == [dict, list]

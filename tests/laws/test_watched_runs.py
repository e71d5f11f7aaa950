"""Law: a run that is traced, profiled and shown in trackers is, bit for bit, the run that is not; and no key of its
environment is in its directory.

Why it must hold: watching reads. Spans are appended to files that the run does not read, a tracker's process reads
`metrics.jsonl`, a profiler observes the operators that run anyway. The runs are on plain processes
(tests/support/local_run.py). Not covered: GPUs, clocks of several nodes (tests/miles_like/report/traces).
"""

from __future__ import annotations

import gzip
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from miles_like.report.traces.chrome import read_trace
from miles_like.report.traces.parts import TracedSpan
from miles_like.report.traces.writer import trace_files
from miles_like.report.trackers.sent import read_sent
from tests.support.forked import tail
from tests.support.local_run import Runs, drive, same_run
from tests.support.otlp_collector import Collector, collector

STEPS = 3
PLANTED = "planted-key-2c9d"
SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "CLUSTER_SECRET")
WATCHED = (
    "trackers.use=['wandb','trackio']",
    "trackers.offline=true",
    "trackers.samples_every=2",
    "trackers.exit_s=240",
    "trace.on=true",
    "trace.window=2",
    "trace.profile_steps='2:3'",
)


def drive_in(environment: Mapping[str, str], run_dir: Path, home: Path, settings: Sequence[str]) -> int:
    """In the driver's process."""
    os.environ.update(environment)
    return drive(run_dir, home, settings, None)


def done(runs: Runs, name: str, *settings: str, **environment: str) -> Path:
    """The directory of a run to its end."""
    run_dir = runs.home / name
    given = (f"train.steps={STEPS}", *settings)
    assert runs.call(run_dir / "driver.log", drive_in, environment, run_dir, runs.home, given) == 0, tail(
        run_dir / "driver.log"
    )
    return run_dir


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("watched")) as started:
        yield started


@pytest.fixture(scope="module")
def plain(runs: Runs) -> Path:
    return done(runs, "plain")


@pytest.fixture(scope="module")
def collected() -> Iterator[Collector]:
    with collector() as there:
        yield there


@pytest.fixture(scope="module")
def watched(runs: Runs, collected: Collector) -> Path:
    secrets = dict.fromkeys(SECRETS, PLANTED * 3) | {"OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{PLANTED}"}
    given = ("cluster.env.CLUSTER_SECRET=''", f"trace.otlp='{collected.url}'", *WATCHED)
    return done(runs, "watched", *given, **secrets)


def test_a_watched_run_is_the_run(plain: Path, watched: Path) -> None:
    same_run(plain, watched)
    assert not [name for name in ("traces", "profiles", "trackers") if (plain / name).exists()]


def test_a_tracker_that_hangs_changes_no_step(runs: Runs, plain: Path) -> None:
    """Its server accepts connections and never answers: the run ends as it would, once `exit_s` have passed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        keys = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}
        hung = done(runs, "hung", "trackers.use=['wandb']", "trackers.exit_s=1", **keys)
    same_run(plain, hung)
    assert "wandb: 4 of 4 rows were not sent within trackers.exit_s = 1 s" in (hung / "driver.log").read_text()


def test_no_key_reaches_a_file(watched: Path) -> None:
    found = [path for path in watched.rglob("*") if path.is_file()]
    assert len(found) > 30
    assert not [str(path) for path in found if PLANTED.encode() in path.read_bytes()]


def test_every_row_is_in_every_tracker(watched: Path) -> None:
    for name in ("wandb", "trackio"):
        state = read_sent(watched, name)
        assert (state.step, state.table, state.finished, state.error) == (STEPS, 2, True, "")


def spans_of(run_dir: Path, name: str, process: str) -> list[TracedSpan]:
    found = [span for path in trace_files(run_dir) for span in read_trace(path)]
    return [span for span in found if span.name == name and span.process.startswith(process)]


def test_each_process_has_its_phases_in_a_file_for_each_window(watched: Path) -> None:
    assert [path.name for path in trace_files(watched)] == ["steps_000001-000002.json", "steps_000003-000003.json"]
    assert not (watched / "traces" / "parts").exists()
    steps = spans_of(watched, "step", "driver")
    assert [(s.args["step"], s.args["version"]) for s in steps] == [(1, 0), (2, 1), (3, 2)]
    rows = [json.loads(line) for line in (watched / "metrics.jsonl").read_text().splitlines()]
    for span, row in zip(steps, rows[1:], strict=True):
        assert span.took / 1e9 == pytest.approx(row["perf/step_s"], abs=0.5)
    trained = [{s for group in sampled(watched, step) for s in group} for step in range(1, STEPS + 1)]
    for name, process in (("train", "driver"), ("train", "trainer_rank0")):
        assert [set(s.args["samples"]) for s in spans_of(watched, name, process)] == trained
    for span, (outer, inner) in zip(
        steps, zip(*(spans_of(watched, "train", p) for p in ("driver", "trainer")), strict=True), strict=True
    ):
        assert span.start <= outer.start <= inner.start and inner.end <= outer.end <= span.end
    for name in ("fill", "meet", "forward and backward", "optimizer", "publish", "save"):
        assert len(spans_of(watched, name, "trainer_rank0")) >= STEPS, name
    for name in ("rollout", "publish", "checkpoint", "evaluate"):
        assert spans_of(watched, name, "driver"), name


def test_a_collector_has_the_spans_of_the_files(watched: Path, collected: Collector) -> None:
    """Those of all processes; a file has microseconds."""
    there = {(s.instance, s.name, s.start // 1000, (s.end - s.start) // 1000) for s in collected.spans}
    found = [span for path in trace_files(watched) for span in read_trace(path)]
    assert {(f"{s.process}.{s.pid}", s.name, s.start // 1000, s.took // 1000) for s in found} == there
    processes = {s.instance.rpartition(".")[0].rstrip("0") for s in collected.spans}
    assert processes == {"driver", "trainer_rank", "rollout_server"}
    assert {h["authorization"] for h in collected.headers} == {f"Bearer {PLANTED}"}
    trained = [s for s in collected.spans if (s.name, s.instance.split(".")[0]) == ("train", "trainer_rank0")]
    assert [set(s.attributes["samples"]) for s in trained] == [
        {name for group in sampled(watched, step) for name in group} for step in range(1, STEPS + 1)
    ]


def test_a_sample_is_followed_from_the_request_to_the_update(watched: Path) -> None:
    """By its key, through the driver, the server and the rank; with the weight version that sampled it."""
    sample = sampled(watched, 2)[0][0]
    for name, process in (("request", "driver"), ("generate", "driver"), ("train", "trainer")):
        assert [s for s in spans_of(watched, name, process) if sample in s.args["samples"]], name
    on_server = [s for s in spans_of(watched, "generate", "rollout_server") if sample in s.args.get("samples", ())]
    asked = [s for s in spans_of(watched, "request", "driver") if sample in s.args["samples"]]
    assert len(on_server) == len(asked) and {s.args["version"] for s in on_server} <= {"0", "1", "2"}
    for there, here in zip(on_server, asked, strict=True):
        assert here.start <= there.start and there.end <= here.end
    assert spans_of(watched, "engine", "rollout_server")


def sampled(run_dir: Path, step: int) -> list[list[str]]:
    """The names of a step's samples, by their prompts."""
    groups: dict[str, list[str]] = {}
    for line in (run_dir / "rollouts" / f"step_{step}.jsonl").read_text().splitlines():
        one = json.loads(line)
        groups.setdefault(one["prompt_id"], []).append(f"{one['prompt_id']}/{one['index']}")
    return list(groups.values())


def test_the_chosen_steps_are_profiled(watched: Path) -> None:
    found = sorted(str(path.relative_to(watched / "profiles")) for path in (watched / "profiles").rglob("*.gz"))
    assert found == [f"step_{step}/trainer_rank0_{call}.json.gz" for step in (2, 3) for call in ("publish", "train")]
    events = json.loads(gzip.decompress((watched / "profiles" / found[1]).read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" and event["args"].get("Input Dims") for event in events)
    allocations = [event["args"] for event in events if event.get("name") == "[memory]"]
    assert any(one["Bytes"] > 0 for one in allocations) and any(one["Bytes"] < 0 for one in allocations)

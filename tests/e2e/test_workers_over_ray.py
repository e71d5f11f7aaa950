"""A run whose rollout workers are Ray's actors is, bit for bit, the run whose driver samples.

With everything that reads and writes columns: a critic, a reference with its own ranks, a teacher. On one machine; on
two nodes: tests/cluster/test_spread_run.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from miles_like.report.traces.chrome import read_trace
from miles_like.report.traces.writer import trace_files
from tests.e2e.conftest import ROOT, Run
from tests.support.forked import tail
from tests.support.local_run import COLUMNS, QUICK, TINY, Runs, same_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("over_ray")) as started:
        yield started


@pytest.mark.long(beside="tests/laws/test_rollout_workers.py")
@pytest.mark.parametrize("case", COLUMNS)
def test_a_run_by_actors_is_the_run_without_workers(runs: Runs, miles_like: Run, case: str) -> None:
    alone, by_actors = runs.home / f"{case}, alone", runs.home / f"{case}, by actors"
    given = (
        "parallel.dp=2",
        "rollout.servers=2",
        "train.steps=2",
        "eval.every=0",
        "train.token_logprobs_every=1",
        *COLUMNS[case],
    )
    assert runs.run(alone, (*given, "rollout.workers=0")) == 0, tail(alone / "driver.log")
    own = (
        "rollout.workers=2",
        "trace.on=true",
        f"model.path={runs.home}/hf",
        "model.make=false",
        f"cache_dir={runs.home}/cache",
    )
    words = [word for setting in (*QUICK, *given, *own) for word in ("--set", setting)]
    done = miles_like("train", str(TINY), "--run-dir", str(by_actors), *words, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    same_run(by_actors, alone)
    rows = [json.loads(line) for line in (by_actors / "metrics.jsonl").read_text().splitlines()]
    assert all(row["perf/held_bytes"] > 0 for row in rows[1:])
    assert len(list((by_actors / "logs").glob("rollout_worker*.log"))) == 2
    spans = [s for path in trace_files(by_actors) for s in read_trace(path) if s.process == "rollout_worker"]
    assert len({s.pid for s in spans}) == 2
    for step in (1, 2):
        rollouts = [json.loads(x) for x in (by_actors / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]
        for key in (f"{s['prompt_id']}/{s['index']}" for s in rollouts):
            names = {s.name for s in spans if key in s.args.get("samples", ())}
            assert {"generate", "request"} <= names, f"{key} of step {step}: a worker sampled it"

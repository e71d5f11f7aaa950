"""Law: a run in which a server is replaced is the run in which none was, and no sample of a wrong server is trained.

A server that dies, hangs, runs out of memory or computes with an old weight is stopped, and another joins at the
current version by one full load. A synchronous deterministic run is a function of its configuration, whichever server
samples what: its rollouts, weights, ledger and metrics are equal byte for byte, but for what it counts of publications.
A free run depends on the clock; its ledger closes, no token is older than the bound, and the versions are those of the
run.

Two servers of the embedded engine on plain processes (tests/support/local_run.py), all else is real. Not covered: Ray's
actors (tests/miles_like/cluster/test_rollout_servers.py), stock SGLang, turns, in which no server is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.checkpoint.ledger_audit import audit
from tests.support import replaced_run
from tests.support.forked import tail
from tests.support.local_run import Runs, tensors, untimed
from tests.support.refusals import check_refusal

HERE = "tests/laws/test_replaced_servers.py"
LONG = pytest.mark.long(beside=HERE)
STEPS = 4
TWO = (
    "rollout.servers=2",
    "publish.replacements=3",
    f"train.steps={STEPS}",
    "checkpoint.every=0",
    "mismatch.checksums_every=1",
)
COUNTED = "sync/"  # metrics of publications
Row = dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("replaced")) as started:
        yield started


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    """The run in which nothing goes wrong."""
    where = runs.home / "whole"
    assert run(runs, where, (), "none") == 0, tail(where / "driver.log")
    return where


def run(
    runs: Runs,
    where: Path,
    settings: Sequence[str],
    fault: str,
    numbers: Sequence[int] = (1,),
    *,
    point: str = "publication",
    spares: int = 3,
) -> int:
    arguments = (where, runs.home, (*TWO, *settings), fault, numbers, point, spares)
    return runs.call(where / "driver.log", replaced_run.drive, *arguments)


def rows(where: Path) -> list[Row]:
    return [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]


def same(where: Path, whole: Path) -> None:
    for step in range(1, STEPS + 1):
        kept = [path / "rollouts" / f"step_{step}.jsonl" for path in (where, whole)]
        assert kept[0].read_bytes() == kept[1].read_bytes(), f"samples of step {step}"
    assert (where / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    assert untimed(where / "metrics.jsonl", COUNTED) == untimed(whole / "metrics.jsonl", COUNTED)
    found, want = (tensors(path / "checkpoints" / f"step_{STEPS}" / "trainer") for path in (where, whole))
    assert found.keys() == want.keys() and len(found) > 20
    for name, x in found.items():
        assert x.view(torch.uint8).equal(want[name].view(torch.uint8)), name


def counts(where: Path, name: str) -> list[float]:
    """Of each step."""
    return [row[f"sync/{name}"] for row in rows(where) if f"sync/{name}" in row]


def log(where: Path) -> str:
    return (where / "driver.log").read_text()


SETTINGS = {path: (f"publish.path={path}",) for path in ("tensor", "disk", "distributed")}
CASES = [
    pytest.param("stale", "tensor"),
    *(pytest.param(fault, "tensor", marks=LONG) for fault in ("killed", "stopped", "out of memory")),
    pytest.param("killed", "distributed", marks=LONG),
    *(pytest.param(fault, "disk", marks=LONG) for fault in ("stale", "killed", "stopped", "out of memory")),
]


@pytest.mark.parametrize(("fault", "path"), CASES)
def test_a_server_that_goes_wrong_at_a_publication_is_replaced(runs: Runs, whole: Path, fault: str, path: str) -> None:
    where = runs.home / f"{fault.replace(' ', '-')}-{path}"
    patience = ("rollout.request_timeout_s=3",) if fault == "stopped" else ()
    assert run(runs, where, (*SETTINGS[path], *patience), fault) == 0, tail(where / "driver.log")
    same(where, whole)
    first = 1 if fault == "stale" else replaced_run.VERSION  # a weight is old from the first version on
    replaced = [float(step == first) for step in range(1, STEPS + 1)]
    if fault == "out of memory":  # one request fails; the second publication succeeds
        assert counts(where, "replacements") == [0.0] * STEPS and counts(where, "republications") == replaced
    else:
        assert counts(where, "replacements") == replaced
        again = fault == "stale" or path == "distributed"  # a group loses the publication with one of its members
        assert counts(where, "republications") == (replaced if again else [0.0] * STEPS)
        assert "(1 of at most 3): " in log(where)
    assert counts(whole, "replacements") == counts(whole, "republications") == [0.0] * STEPS


@LONG
@pytest.mark.parametrize("path", ["disk", "tensor", "delta", "distributed"])
@pytest.mark.parametrize("fault", ["stale", "killed", "out of memory"])
def test_a_server_is_replaced_while_the_next_step_trains(runs: Runs, fault: str, path: str) -> None:
    """It gets the version from its files, which the trainer's weights are no longer."""
    settings = (f"publish.path={path}", "buffer.max_staleness=1", "mismatch.checksums_every=0", "eval.every=0")
    waits, where = runs.home / f"waits-{path}", runs.home / f"beside-{path}-{fault.replace(' ', '-')}"
    if not waits.exists():
        assert run(runs, waits, settings, "none") == 0, tail(waits / "driver.log")
    assert run(runs, where, (*settings, "publish.during_training=true"), fault) == 0, tail(where / "driver.log")
    same(where, waits)
    assert sum(counts(where, "replacements")) == float(fault != "out of memory")


@LONG
@pytest.mark.parametrize("fault", ["stale", "killed"])
def test_both_servers_may_be_replaced(runs: Runs, whole: Path, fault: str) -> None:
    where = runs.home / f"both-{fault}"
    assert run(runs, where, (), fault, (0, 1)) == 0, tail(where / "driver.log")
    same(where, whole)
    assert sum(counts(where, "replacements")) == 2


@LONG
def test_a_server_that_dies_while_it_samples_is_replaced_at_the_next_publication(runs: Runs, whole: Path) -> None:
    """Its requests are sampled again by the other one."""
    where = runs.home / "generation"
    assert run(runs, where, (), "none", point="generation") == 0, tail(where / "driver.log")
    same(where, whole)
    assert counts(where, "replacements") == [float(step == replaced_run.VERSION + 1) for step in range(1, STEPS + 1)]
    assert "its requests go to other servers" in log(where)


@LONG
@pytest.mark.parametrize(("limit", "numbers"), [(0, (1,)), (1, (0, 1))])
def test_a_run_ends_where_no_further_server_may_be_replaced(runs: Runs, limit: int, numbers: Sequence[int]) -> None:
    where = runs.home / f"ends-{limit}"
    assert run(runs, where, (f"publish.replacements={limit}",), "stale", numbers) == 2
    (error,) = [line for line in log(where).splitlines() if line.startswith("error: ")]
    check_refusal(error, "version 1", "twice", "http://127.0.0.1", "nats", "--resume", unrecorded="free ports and gaps")
    assert ("publish.replacements = 1" in error) == bool(limit)


@LONG
@pytest.mark.parametrize("point", ["publication", "generation"])
def test_a_free_run_loses_no_sample_of_a_server_that_dies(runs: Runs, point: str) -> None:
    free = ("alignment.deterministic=false", "eval.every=0", "rollout.max_new_tokens=100", "buffer.max_staleness=2")
    where = runs.home / f"free-{point}"
    settings = (*free, "buffer.lockstep=false", "train.steps=6")
    assert run(runs, where, settings, "killed", point=point) == 0, tail(where / "driver.log")
    found = audit(where / "ledger.jsonl")
    assert found.wrong is None and found.unfinished == 0
    assert [totals.step for totals in found.steps] == list(range(1, 7)) and found.steps[-1].trained == 6 * 8
    assert sum(counts(where, "replacements")) == 1
    assert max(row.get("async/staleness/max", 0.0) for row in rows(where)) <= 2
    for step in range(1, 7):
        for line in (where / "rollouts" / f"step_{step}.jsonl").read_text().splitlines():
            versions = [span[0] for span in json.loads(line)["versions"]]
            assert versions == sorted(versions) and step - 3 <= versions[0] and versions[-1] <= step

"""Law: a run whose servers fail is the run in which none did, and no sample of a wrong server is trained.

A server that dies, hangs, runs out of memory or computes with an old weight is restarted beside the run, and joins at
the current version by one full load; one that comes back wrong never serves. A synchronous deterministic run is a
function of its configuration, whichever server samples what: its rollouts, weights, ledger and metrics are equal byte
for byte, but for what it counts of publications and servers. A free run depends on the clock; its ledger closes, no
token is older than the bound, and the versions are those of the run.

Two servers of the embedded engine on plain processes (tests/support/local_run.py), all else is real. Not covered: Ray's
actors (tests/miles_like/cluster/test_rollout_servers.py), stock SGLang, turns, in which no server is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.checkpoint.ledger_audit import audit
from tests.support import replaced_run
from tests.support.forked import tail
from tests.support.kill_points import Kill, witnesses
from tests.support.local_run import OF_SERVERS, Runs, tensors, untimed
from tests.support.refusals import check_refusal

HERE = "tests/laws/test_replaced_servers.py"
LONG = pytest.mark.long(beside=HERE)
STEPS = 4
TWO = (
    "rollout.servers=2",
    "rollout.restarts=3",
    f"train.steps={STEPS}",
    "checkpoint.every=0",
    "mismatch.checksums_every=1",
)
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
    in_spare: str = "none",
    loop: str | None = None,
    kill: Kill | None = None,
) -> int:
    arguments = (where, runs.home, (*TWO, *settings), fault, numbers, point, spares, in_spare, loop, kill)
    return runs.call(where / "driver.log", replaced_run.drive, *arguments)


def rows(where: Path) -> list[Row]:
    return [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]


def same(where: Path, whole: Path) -> None:
    for step in range(1, STEPS + 1):
        kept = [path / "rollouts" / f"step_{step}.jsonl" for path in (where, whole)]
        assert kept[0].read_bytes() == kept[1].read_bytes(), f"samples of step {step}"
    assert (where / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    assert untimed(where / "metrics.jsonl", *OF_SERVERS) == untimed(whole / "metrics.jsonl", *OF_SERVERS)
    found, want = (tensors(path / "checkpoints" / f"step_{STEPS}" / "trainer") for path in (where, whole))
    assert found.keys() == want.keys() and len(found) > 20
    for name, x in found.items():
        assert x.view(torch.uint8).equal(want[name].view(torch.uint8)), name


def counts(where: Path, name: str) -> list[float]:
    """Of each step."""
    return [row[name] for row in rows(where) if name in row]


def states(where: Path, server: int = 1) -> list[str]:
    """What the console has of a server, but that it was suspected: a busy machine answers late."""
    lines = re.findall(rf"Rollout server {server} \([^)]*\) is (\w+)", log(where))
    changes = pairwise(["", *map(str, lines)])
    return [to for of, to in changes if to != "suspect" and (of, to) != ("suspect", "healthy")]


def log(where: Path) -> str:
    return (where / "driver.log").read_text()


SETTINGS = {path: (f"publish.path={path}",) for path in ("tensor", "disk", "distributed")}
BACK = ["dead", "restarting", "stale", "healthy"]
PATIENCE = ("rollout.health_every_s=1", "rollout.health_timeout_s=4", "rollout.request_timeout_s=20")
CASES = [
    pytest.param("stale", "tensor"),
    *(pytest.param(fault, "tensor", marks=LONG) for fault in ("killed", "stopped", "out of memory")),
    *(pytest.param(fault, "distributed", marks=LONG) for fault in ("killed", "out of memory")),
    *(pytest.param(fault, "disk", marks=LONG) for fault in ("stale", "killed", "stopped", "out of memory")),
]


@pytest.mark.parametrize(("fault", "path"), CASES)
def test_a_server_that_goes_wrong_at_a_publication_is_replaced(runs: Runs, whole: Path, fault: str, path: str) -> None:
    where = runs.home / f"{fault.replace(' ', '-')}-{path}"
    patience = PATIENCE if fault == "stopped" else ()
    assert run(runs, where, (*SETTINGS[path], *patience), fault) == 0, tail(where / "driver.log")
    same(where, whole)
    first = 1 if fault == "stale" else replaced_run.VERSION  # a weight is old from the first version on
    replaced = [float(step == first) for step in range(1, STEPS + 1)]
    if fault == "out of memory":  # one request fails; the second publication succeeds
        assert states(where) == ["stale", "healthy"] and counts(where, "sync/republications") == replaced
    else:
        found = states(where)
        assert found[found.index("dead") :] in (BACK[:n] for n in range(2, 5)), "it may come back after the end"
        again = fault == "stale" or path == "distributed"  # a group loses the publication with one of its members
        assert counts(where, "sync/republications") == (replaced if again else [0.0] * STEPS)
    assert "dead" not in states(whole) and (fault == "stopped" or "dead" not in states(where, 0))


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_server_that_fails_while_it_samples_is_replaced_beside_the_run(runs: Runs, whole: Path, fault: str) -> None:
    """Its requests are sampled again by the other one, with the same seeds."""
    where = runs.home / f"generation-{fault}"
    assert run(runs, where, PATIENCE, fault, point="generation") == 0, tail(where / "driver.log")
    same(where, whole)
    found = states(where)  # a publication that begins before its death is known finds it stale
    assert found[found.index("dead") :][:2] == ["dead", "restarting"]
    assert sum(counts(where, "rollout/reissued")) > 0


@pytest.mark.parametrize("path", ["tensor", pytest.param("disk", marks=LONG), pytest.param("distributed", marks=LONG)])
def test_a_server_that_is_away_when_a_trainer_rank_is_lost_joins_the_rebuilt_ranks(
    runs: Runs, whole: Path, tmp_path: Path, path: str
) -> None:
    """Its process starts only once the rank was killed. One fleet has both lives of the ranks, and each life an epoch
    of the directory."""
    where, kill = runs.home / f"rank-too-{path}", Kill(victim="rank", point="step", step=2, where="before")
    settings, loop = (*SETTINGS[path], "checkpoint.every=2", "cluster.rebuilds=1"), tmp_path / "loop.py"
    loop.write_text(replaced_run.STANDS.format(run_dir=str(where)))
    more: dict[str, Any] = {"point": "generation", "spares": 1, "in_spare": "waits", "loop": str(loop), "kill": kill}
    assert run(runs, where, settings, "killed", **more) == 0, tail(where / "driver.log")
    same(where, whole)
    (seen,) = witnesses(where)
    assert seen["seen"]["with_gradient"] > 0, "in mid-step"
    assert states(where) == BACK and counts(where, "rollout/servers_healthy")[-1] == 2.0
    before, _, after = log(where).partition("Trainer ranks are rebuilt (1 of at most 1")
    assert "Rollout server 1" in before and "is stale" not in before and "step 3 is next" in after
    assert "dead" not in states(where, 0)
    assert json.loads((where / "epoch.json").read_text())["begun"] == [[1, 0], [2, 2]]


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
    assert ("dead" in states(where)) == (fault != "out of memory")


@LONG
@pytest.mark.parametrize(
    ("fault", "point"), [("stale", "publication"), ("killed", "publication"), ("killed", "generation")]
)
def test_both_servers_may_be_replaced(runs: Runs, whole: Path, fault: str, point: str) -> None:
    """The run waits until one serves."""
    where = runs.home / f"both-{fault}-{point}"
    assert run(runs, where, (), fault, (0, 1), point=point) == 0, tail(where / "driver.log")
    same(where, whole)
    assert "healthy" in {*states(where, 0), *states(where)}


@LONG
def test_a_server_that_comes_back_wrong_never_serves(runs: Runs, whole: Path) -> None:
    """Its restarts are used up; the run goes on without it."""
    where = runs.home / "wrong-spares"
    settings = ("rollout.restarts=1",)
    assert run(runs, where, settings, "killed", point="generation", in_spare="stale") == 0, tail(where / "driver.log")
    same(where, whole)
    assert "healthy" not in states(where), "an old weight is noticed from the second version on"


@LONG
def test_a_run_goes_on_without_a_server_that_does_not_start(runs: Runs, whole: Path) -> None:
    where = runs.home / "no-spares"
    assert run(runs, where, (), "killed", point="generation", spares=0) == 0, tail(where / "driver.log")
    same(where, whole)
    assert states(where)[-1] == "retired" and counts(where, "rollout/servers_healthy")[-1] == 1.0


@LONG
@pytest.mark.parametrize(("least", "numbers"), [(1, (0, 1)), (2, (1,))])
def test_a_run_ends_where_too_few_servers_are_left(runs: Runs, least: int, numbers: Sequence[int]) -> None:
    where = runs.home / f"ends-{least}"
    settings = (f"rollout.min_servers={least}",)
    assert run(runs, where, settings, "killed", numbers, point="generation", spares=0) == 2
    (error,) = [line for line in log(where).splitlines() if line.startswith("error: ")]
    facts = ("rollout.min_servers", least, "server 0", "server 1", "retired", "no process is left", "--resume")
    check_refusal(error, *facts, unrecorded="free ports")


@LONG
def test_without_restarts_the_first_server_that_fails_ends_the_run(runs: Runs) -> None:
    where = runs.home / "first"
    assert run(runs, where, ("rollout.restarts=0", "rollout.min_servers=2"), "stale", (1,)) == 2
    (error,) = [line for line in log(where).splitlines() if line.startswith("error: ")]
    check_refusal(error, "version 1", "twice", "http://127.0.0.1", "nats", "--resume", unrecorded="free ports and gaps")


@LONG
def test_servers_are_added_and_removed_while_a_run_goes_on(runs: Runs, whole: Path, tmp_path: Path) -> None:
    where, loop = runs.home / "changed", tmp_path / "loop.py"
    loop.write_text(replaced_run.CHANGES.format(run_dir=str(where)))
    assert run(runs, where, (), "none", loop=str(loop)) == 0, tail(where / "driver.log")
    same(where, whole)
    assert counts(where, "rollout/servers_healthy") == [2.0, 3.0, 2.0, 2.0] and states(where, 0) == ["retired"]


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
    assert "dead" in states(where)
    assert max(row.get("async/staleness/max", 0.0) for row in rows(where)) <= 2
    for step in range(1, 7):
        for line in (where / "rollouts" / f"step_{step}.jsonl").read_text().splitlines():
            versions = [span[0] for span in json.loads(line)["versions"]]
            assert versions == sorted(versions) and step - 3 <= versions[0] and versions[-1] <= step

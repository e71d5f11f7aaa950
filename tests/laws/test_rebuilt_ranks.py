"""Law: a run whose trainer ranks are killed, again and again, goes on by itself and is the run that was not disturbed,
bit for bit, with the same driver process and the same servers.

Each kill has a witness, as in test_kills.py, whose runs are started again by hand. Here one start takes all kills: what
was sampled, trained, published or saved after the last checkpoint is done again on ranks that are started in place of
the others. The servers serve what was trained before the loss until they get the restored weights, under a version that
no weights had before.

Not covered: Ray's actors (tests/e2e/test_rebuilt_ranks_ray.py), GPUs, a lost node.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miles_like.checkpoint.ledger_audit import audit
from tests.laws.test_kills import believed, kill, same
from tests.support.chosen import later
from tests.support.forked import tail
from tests.support.kill_points import Kill, witnesses
from tests.support.local_run import Runs
from tests.support.refusals import check_refusal

HERE = "tests/laws/test_rebuilt_ranks.py"
STEPS = 5
KILLS = (
    kill("rank", "step", 0, "before"),  # before there is a checkpoint
    kill("rank", "publish", 1, 2),
    kill("rank", "generation", 1, 5),
    kill("rank", "save", 2, "shards"),
    kill("rank", "save", 2, "latest"),
    kill("rank", "step", 3, "half"),  # the servers serve version 3, and checkpoint 2 is restored
    kill("rank", "publish", 4, 1),
)
EACH = (  # of less work
    kill("rank", "step", 0, "before"),
    kill("rank", "save", 2, "shards"),
    kill("rank", "generation", 2, 5),
    kill("rank", "step", 3, "half"),
    kill("rank", "publish", 4, 1),
)


@dataclass(frozen=True)
class Chain:
    settings: tuple[str, ...]
    kills: tuple[Kill, ...] = KILLS


EVERY = "checkpoint.every=2"
CHAINS = {
    "synchronous": Chain((EVERY,)),
    "two behind, saved beside training": Chain((EVERY, "buffer.max_staleness=2", "checkpoint.asynchronous=true")),
    "two ranks, one behind, a filter": Chain(
        (EVERY, "parallel.dp=2", "parallel.ep=2", "buffer.max_staleness=1", "algorithm.filter=nonzero_std"), EACH
    ),
    "workers": Chain((EVERY, "rollout.workers=1", "buffer.max_staleness=1"), KILLS[1:3] + KILLS[5:6]),
    "turns": Chain((EVERY, "cluster.colocate=true"), KILLS[:1] + KILLS[5:]),
    **{
        path: Chain((EVERY, f"publish.path={path}"), (KILLS[0], KILLS[2], KILLS[5]))
        for path in ("disk", "delta", "distributed", "reshard")
    },
    "servers load beside training": Chain(
        (EVERY, "buffer.max_staleness=1", "publish.path=disk", "publish.during_training=true"),
        (KILLS[0], KILLS[2], KILLS[5]),
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("rebuilt")) as started:
        yield started


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rebuilt(runs: Runs, run_dir: Path, settings: Sequence[str], kills: tuple[Kill, ...], rebuilds: int) -> int:
    return runs.run(run_dir, (*settings, f"cluster.rebuilds={rebuilds}"), kills)


@pytest.mark.parametrize("name", later(CHAINS, ["two ranks, one behind, a filter"], beside=HERE))
def test_a_run_that_loses_ranks_is_the_run_that_lost_none(runs: Runs, name: str) -> None:
    chain, where = CHAINS[name], runs.home / name.replace(" ", "-")
    settings = (*chain.settings, f"train.steps={STEPS}")
    assert runs.run(where / "whole", settings) == 0, tail(where / "whole" / "driver.log")
    lost = where / "lost"
    assert rebuilt(runs, lost, settings, chain.kills, len(chain.kills)) == 0, tail(lost / "driver.log")
    found = witnesses(lost)
    assert len(found) == len(chain.kills), tail(lost / "driver.log")
    assert all(map(believed, found)), found
    lives = lines(lost / "introduced.jsonl")
    assert len({life["driver"] for life in lives}) == len({life["server"] for life in lives}) == 1
    assert len({life["rank"] for life in lives}) == len(lives) == len(chain.kills) + 1
    same(lost, where / "whole", STEPS)
    assert audit(lost / "ledger.jsonl").wrong is None
    rows = [row for row in lines(lost / "metrics.jsonl") if "perf/rebuilds" in row]
    assert rows[-1]["perf/rebuilds"] == len(chain.kills) and all(row["perf/lost_s"] > 0 for row in rows)


@pytest.mark.long(beside=HERE)
def test_a_run_that_loses_ranks_more_often_than_it_may_names_each_loss(runs: Runs) -> None:
    where = runs.home / "often"
    settings = (EVERY, f"train.steps={STEPS}")
    assert rebuilt(runs, where, settings, KILLS[:2], 1) == 2, tail(where / "driver.log")
    (error,) = [line for line in (where / "driver.log").read_text().splitlines() if line.startswith("error: ")]
    check_refusal(error, "ranks were lost 2 times", "cluster.rebuilds = 1", "1. ", "2. ", "trainer rank 0", "--resume",
                  unrecorded="the moment at which a loss is seen")  # fmt: skip
    assert len(lines(where / "introduced.jsonl")) == 2

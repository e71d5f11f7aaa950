"""Law: a run on given answers whose trainer ranks are killed, again and again, goes on by itself and is the run that
was not disturbed, bit for bit, with the same driver process.

As test_rebuilt_ranks.py, whose runs sample: kills before there is a checkpoint, in mid-step and in a save. DPO and KTO
measure from the weights that the run began with, which ranks that are started later must have again.

Not covered: Ray's actors (tests/e2e/test_rebuilt_ranks_ray.py), GPUs, a lost node.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.laws.test_kills import believed, kill
from tests.laws.test_rebuilt_ranks import lines
from tests.support.chosen import later
from tests.support.forked import USERS_ERRORS, Forked, answers, tail
from tests.support.kill_points import Kill, witnesses
from tests.support.local_run import ROOT, Runs, tensors, untimed

HERE = "tests/laws/test_rebuilt_supervised_ranks.py"
STEPS = 5
SMALL = (
    *("train.groups_per_step=6", f"train.steps={STEPS}", "eval.every=2", "eval.max_prompts=4", "checkpoint.every=2"),
    *("precision.qat=false", "data.max_prompt_tokens=64"),
)
KILLS = (
    kill("rank", "step", 0, "before"),  # before there is a checkpoint
    kill("rank", "save", 2, "shards"),
    kill("rank", "save", 2, "latest"),
    kill("rank", "step", 3, "half"),
)
CASES = {
    "sft": ("parallel.dp=2", "parallel.ep=2"),
    "dpo": ("parallel.dp=1", "parallel.ep=1"),
    "kto": ("parallel.dp=1", "parallel.ep=1", "checkpoint.asynchronous=true"),
}


def drive(run_dir: Path, home: Path, name: str, settings: Sequence[str], kills: tuple[Kill, ...]) -> int:
    """The driver's process, with ranks for as many losses; the exit status of the command line."""
    from rich.console import Console

    from miles_like.config.load import load_config
    from miles_like.run import supervised
    from miles_like.run.setup import trainer_side
    from miles_like.run.setup.model_plan import model_plan
    from miles_like.storage.fencing import Fence
    from tests.support import kill_points
    from tests.support.local_parts import LocalLauncher

    vars(trainer_side).update(write_report=lambda run_dir: run_dir / "report.html")
    config = load_config(ROOT / "configs" / f"tiny_{name}.toml", [*SMALL, *settings])
    kill_points.arm(run_dir, kills)
    sets = [
        [
            Forked(f"trainer rank {i}", answers(watched_rank), run_dir / "logs" / f"trainer_{life}_{i}.log")
            for i in range(config.parallel.world_size)
        ]
        for life in range(1 + len(kills))
    ]
    try:
        plan = model_plan(config, run_dir, home / "hf", home / "megatron", Fence.begin(run_dir))
        launcher = LocalLauncher(
            {"trainer": sets[0]},
            (),
            (),
            [{"trainer": of} for of in sets[1:]],
            lambda started: kill_points.introduce(driver=os.getpid(), rank=started[-1].pid),
        )
        kill_points.watch_driver(launcher)
        supervised.train_supervised(plan, Console(highlight=False, width=200), resume=False, launcher=launcher)
    except USERS_ERRORS as e:
        traceback.print_exc()
        print(f"error: {e}", flush=True)
        return 2
    finally:
        for process in (one for of in sets for one in of):
            process.kill()
    return 0


def watched_rank() -> Any:
    from tests.support import kill_points
    from tests.support.local_parts import SealingRank

    return kill_points.watched_rank(SealingRank)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("rebuilt_supervised")) as started:
        yield started


@pytest.mark.parametrize("name", later(CASES, ["sft"], beside=HERE))
def test_a_supervised_run_that_loses_ranks_is_the_run_that_lost_none(runs: Runs, name: str) -> None:
    whole, lost = (runs.home / name / what for what in ("whole", "lost"))
    for run_dir, kills in ((whole, ()), (lost, KILLS)):
        settings = (*CASES[name], f"cluster.rebuilds={len(kills)}")
        assert runs.call(run_dir / "driver.log", drive, run_dir, runs.home, name, settings, kills) == 0, tail(
            run_dir / "driver.log"
        )
    found = witnesses(lost)
    assert len(found) == len(KILLS) and all(map(believed, found)), found
    lives = lines(lost / "introduced.jsonl")
    assert len({life["driver"] for life in lives}) == 1
    assert len({life["rank"] for life in lives}) == len(lives) == len(KILLS) + 1
    assert untimed(lost / "metrics.jsonl") == untimed(whole / "metrics.jsonl")
    kept = [where / "checkpoints" / f"step_{STEPS}" for where in (whole, lost)]
    a, b = (tensors(folder / "trainer") for folder in kept)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    states = [json.loads((folder / "run_state.json").read_text()) for folder in kept]
    assert states[0]["parts"]["prompts"] == states[1]["parts"]["prompts"] == STEPS * 6
    rows = lines(lost / "metrics.jsonl")
    rebuilt = [row for row in rows if "perf/rebuilds" in row]
    assert rebuilt[-1]["perf/rebuilds"] == len(KILLS) and all(row["perf/lost_s"] > 0 for row in rebuilt)
    times = [row["wall_s"] for row in rows if "wall_s" in row]
    assert times == sorted(times), "lost seconds are in it"

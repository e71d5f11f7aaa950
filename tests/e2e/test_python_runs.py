"""`miles_like.train` inside a notebook's event loop, and what `miles-like init` writes, run whole.

Few steps: that they are the right ones is tests/e2e/test_pipeline.py's. Not covered: that a task is learned, Jupyter
itself.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.conftest import LIMIT_S, SMALL, environment
from tests.support.command import Commands
from tests.support.installed import without_checkout

ONE = ("--set", "train.steps=1")
LONG = pytest.mark.long(beside="tests/e2e/test_python_runs.py")
# an event loop, as a notebook has one, in which a cell passes a function that no file names
CELLS = """
import asyncio, sys
import miles_like

run_dir, again = sys.argv[1], sys.argv[2] == "again"
settings = [word for word in sys.argv[3:] if word != "--set"]

async def cell(steps, resume, **reward):
    return miles_like.train(
        "tiny", run_dir=run_dir, overrides=[*settings, f"train.steps={steps}"], resume=resume, **reward
    )

async def notebook():
    scored = []
    def reward(sample):
        scored.append(sample.response)
        return {"score": float(len(sample.response)), "even": 1.0}
    first = await cell(1, False, reward=reward)
    assert len(scored) >= 24 and first.checkpoint.name == "step_1", (len(scored), first.checkpoint)
    rows = first.samples(1)
    assert [row["reward"] for row in rows] == [float(len(row["response"])) for row in rows]
    assert first.metrics.loc[1, "rollout/reward/even/mean"] == 1.0
    try:
        await cell(2, True)
    except miles_like.UserError as e:
        print("refused:", e)
    if again:
        second = await cell(2, True, reward=reward)
        assert list(second.metrics.index) == [0, 1, 2] and second.checkpoint.name == "step_2"
        assert second.summary["rollout/reward/mean"]["last"] == second.rows[2]["rollout/reward/mean"]

asyncio.run(notebook())
"""


@pytest.mark.parametrize("resumed", ["refused", pytest.param("again", marks=LONG)])
def test_a_run_in_a_notebook_s_loop_asks_its_function_and_is_resumed_with_it_alone(
    commands: Commands, ray: Mapping[str, str], home: Path, tmp_path: Path, resumed: str
) -> None:
    (tmp_path / "cells.py").write_text(CELLS)
    words = [str(home / f"python_{resumed}"), resumed, *SMALL]
    done = commands.run(str(tmp_path / "cells.py"), words, environment(**ray), LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    (refused,) = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    assert "'reward'" in refused and "miles_like.train(..., reward=..., resume=True)" in refused


@LONG
@pytest.mark.parametrize("task", ["qa", "tool", "agent", "distill", "sft"])
def test_what_init_writes_runs_as_it_is_without_the_checkout(
    python: Path, home: Path, tmp_path: Path, task: str
) -> None:
    """With a shorter warm-up."""

    def miles_like(*words: str) -> subprocess.CompletedProcess[str]:
        return without_checkout([str(python.parent / "miles-like"), *words], tmp_path)

    made = miles_like("init", task, "--task", task)
    assert made.returncode == 0, made.stderr
    teacher = ("--set", "distillation.teachers.clean.make.max_steps=4") if task == "distill" else ()
    few = SMALL if task != "sft" else (*SMALL[:4], "--set", "train.groups_per_step=6")
    words = (f"{task}/config.toml", "--run-dir", str(home / f"init_{task}"))
    done = miles_like("train", *words, *few, *teacher, *ONE)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    rows = [json.loads(line) for line in (home / f"init_{task}" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    wanted = {"sft": "train/loss", "agent": "rollout/turns/mean", "tool": "rollout/reward/called/mean"}
    assert wanted.get(task, "rollout/reward/last_digit/mean") in rows[1]

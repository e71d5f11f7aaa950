"""`miles_like.train` inside a notebook's event loop and in a Jupyter kernel, and what `miles-like init` writes, run
whole.

Few steps: that they are the right ones is tests/e2e/test_pipeline.py's. Not covered: that a task is learned, notebooks'
front ends.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.conftest import LIMIT_S, ROOT, SMALL, environment
from tests.support.command import Commands
from tests.support.installed import without_checkout
from tests.support.pages import blocks

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


@LONG
def test_the_ten_lines_of_the_page_run_in_a_jupyter_kernel(home: Path, tmp_path: Path) -> None:
    """With fewer steps. What a run prints stands below its cell, a mistake is one sentence, and the kernel goes on."""
    import nbformat
    from nbclient import NotebookClient

    page = ROOT / "docs" / "python_api.md"
    lines = next(block.text for block in blocks(page) if block.language == "python")
    assert len([line for line in lines.splitlines() if line.strip()]) <= 10
    few = {name: int(value) for name, value in (word.split("=") for word in SMALL if word != "--set")}
    ten = lines.replace("runs/mine", str(home / "kernel")).replace('{"train.steps": 20}', f"{few | {'train.steps': 1}}")
    assert ten.count("/kernel") == 2 and "'train.steps': 1}" in ten
    mistake = "miles_like.train('trainy', run_dir='runs/other')"
    cells = [ten, mistake, "result.rows[-1]['step'], len(result.samples(1)), result.checkpoint.name"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    where = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(book, timeout=int(LIMIT_S), kernel_name="python3", resources=where, allow_errors=True)
    first, second, third = (cell.outputs for cell in client.execute().cells)
    assert [one.ename for one in first if one.output_type == "error"] == [], first
    shown = "".join(one.text for one in first if one.output_type == "stream")
    assert "step 1/1" in shown and "rollout/reward/mean" in shown
    assert [one for one in first if one.output_type == "display_data"] == [], "lines are text"
    (failed,) = (one for one in second if one.output_type == "error")
    assert failed.ename == "UserError" and "trainy" in failed.evalue and "tiny_sft" in failed.evalue
    assert third[0].data["text/plain"] == "(1, 24, 'step_1')"
    assert (home / "kernel_hf" / "model.safetensors").is_file()

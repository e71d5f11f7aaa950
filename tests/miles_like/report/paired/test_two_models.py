"""`miles-like compare`: runs side by side, and a release gate of two."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from click.testing import Result

from miles_like.cli import app
from miles_like.report.paired.scores import eval_file, write_answers
from miles_like.report.rows import json_row
from tests.support.cli_runner import CliRunner
from tests.support.refusals import check_refusal

SETS = {"heldout": 200, "small": 40}


def made(run_dir: Path, step: int, right: float, *, sets: dict[str, int] | None = None) -> Path:
    """A run with the answers of one evaluation: each problem has a difficulty, the same in all of them."""
    lines = []
    for name, problems in (SETS if sets is None else sets).items():
        for i in range(problems):
            hard = random.Random(f"{name} {i}").random()
            answer = {"set": name, "mode": "greedy", "prompt_id": f"p{i}", "response": "a\u2028line"}
            lines.append(answer | {"reward": float(hard < right)})
    write_answers(eval_file(run_dir, step), lines)
    (run_dir / "checkpoints" / f"step_{step}").mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text(json_row(step, {"rollout/reward/mean": right}) + "\n")
    return run_dir


def compare(*words: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, words)])


def cells(output: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in rows}


def test_a_model_that_is_worse_on_a_set_ends_with_status_1_and_one_within_noise_with_0(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", 20, 0.5), made(tmp_path / "b", 40, 0.42)
    worse = compare(a, b, "--plot", tmp_path / "c.png")
    assert worse.exit_code == 1 and "B is worse than A on heldout" in worse.output, worse.output
    assert cells(worse.output)["heldout"][-1] == "worse" and cells(worse.output)["heldout"][0] == "200"
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    better = compare(b, a)
    assert better.exit_code == 0 and cells(better.output)["heldout"][-1] == "better"
    same = compare(a, made(tmp_path / "c", 20, 0.495))
    assert same.exit_code == 0 and cells(same.output)["heldout"][-1] == "within noise"
    assert compare(a, b, "--errors", 50).exit_code == 0


def test_checkpoints_and_answers_are_compared_as_runs_are(tmp_path: Path) -> None:
    run = made(made(tmp_path / "run", 20, 0.5), 40, 0.3)
    good, bad = run / "checkpoints" / "step_20", run / "checkpoints" / "step_40"
    assert compare(good, bad).exit_code == compare(good, run).exit_code == 1
    assert compare(eval_file(run, 20), eval_file(run, 40)).exit_code == 1 and compare(bad, good).exit_code == 0


@pytest.mark.parametrize("other", [{"else": 50}, {"heldout": 1}])
def test_evaluations_without_common_problems_have_no_verdict(tmp_path: Path, other: dict[str, int]) -> None:
    refused = compare(made(tmp_path / "a", 2, 0.5), made(tmp_path / "b", 2, 0.5, sets=other))
    assert refused.exit_code == 2 and "rollout/reward/mean" in refused.output
    check_refusal(refused.stderr, "heldout, small", next(iter(other)), "the same set")


def test_more_than_two_runs_have_no_verdict_and_a_run_without_evaluations_is_refused(tmp_path: Path) -> None:
    runs = [made(tmp_path / name, 2, right) for name, right in (("a", 0.5), ("b", 0.1), ("c", 0.2))]
    assert compare(*runs).exit_code == 0
    eval_file(runs[1], 2).unlink()
    refused = compare(*runs[:2])
    assert refused.exit_code == 2
    check_refusal(refused.stderr, runs[1], "evals/step_N.jsonl", "--answers")


def test_runs_are_printed_side_by_side(tmp_path: Path) -> None:
    rows = {"a": (0.25, 0.5), "b": (0.5, 0.125), "c": (0.5, 0.5)}
    for name, rewards in rows.items():
        (tmp_path / name).mkdir()
        of = [json_row(i, {"rollout/reward/mean": r, f"of/{name}": 1.0}) + "\n" for i, r in enumerate(rewards, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(of))
    done = compare(*(tmp_path / name for name in rows))
    lines = cells(done.output)
    assert done.exit_code == 0 and lines["rollout/reward/mean"] == [
        "0.25 -> 0.5 (0.5)",
        "0.5 -> 0.125 (0.5)",
        "0.5 -> 0.5 (0.5)",
    ]
    assert f"{tmp_path}/a: 2 steps" in done.output and list(lines) == ["rollout/reward/mean"]
    done = compare("--all", *(tmp_path / name for name in rows))
    assert " of/a " in done.output and " of/b " in done.output
    refused = compare(tmp_path / "a")
    assert refused.exit_code == 2
    check_refusal(refused.stderr, tmp_path / "a", "two")

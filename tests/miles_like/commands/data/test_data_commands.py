"""The data commands from the command line: what they print, their exit status, the files that they leave.

Why it must hold: a script goes on after status 0. Not covered: what is found in a file (tests/miles_like/datasets).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from miles_like.cli import app
from miles_like.config.load import load_config, store_config
from rollout.prompts.dataset import read_rows
from tests.support.cli_runner import CliRunner
from tests.support.refusals import check_refusal

CONFIGS = Path(__file__).parents[4] / "configs"
TINY = CONFIGS / "tiny"


def called(*words: object, status: int = 0) -> str:
    found = CliRunner().invoke(app, ["data", *map(str, words)])
    assert found.exit_code == status, found.output
    return found.output


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Twelve sums of which lines 3 and 12 are the same, and line 5 has a wrong answer to the sum of line 4."""
    sums = [f"{a}+{a + 1}=" for a in range(12)]
    answers = [str(2 * a + 1) for a in range(12)]
    sums[11], answers[11] = sums[2], answers[2]
    sums[4] = sums[3]
    path = tmp_path / "sums.jsonl"
    made = [{"prompt": q, "answer": a, "license": "mit"} for q, a in zip(sums, answers, strict=True)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in made))
    return path


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_from_a_raw_file_to_its_parts(rows: Path, tmp_path: Path) -> None:
    out = called("check", rows, "--reward", "exact_number", "--json", tmp_path / "found.json", status=1)
    assert "line 4: the same prompt has a different answer at line 5" in out
    assert "line 12: repeats line 3" in out
    assert json.loads((tmp_path / "found.json").read_text())["ok"] is False
    held = tmp_path / "held.jsonl"
    held.write_text(lines(rows)[0] + "\n")
    clean = tmp_path / "clean.jsonl"
    out = called("dedup", rows, clean, "--against", held, "--card", tmp_path / "clean.md")
    assert lines(clean) == lines(rows)[1:11] and "10 of 12 rows" in out
    assert "duplicates: 1 rows, 1 exact" in (tmp_path / "clean.md").read_text()
    called("split", clean, tmp_path / "parts", "--parts", "train=0.6,heldout=0.4", "--format", "parquet")
    there = sorted(p.name for p in (tmp_path / "parts").iterdir())
    assert there == ["README.md", "heldout.parquet", "train.parquet"]
    parts = [list(read_rows(str(tmp_path / "parts" / f"{name}.parquet"))) for name in ("train", "heldout")]
    assert sorted(json.dumps(r) for part in parts for r in part) == sorted(lines(clean))
    out = called("stats", tmp_path / "parts" / "train.parquet", "--json", tmp_path / "stats.json")
    assert f"licences: mit {len(parts[0])}" in out
    assert json.loads((tmp_path / "stats.json").read_text())["rows"] == len(parts[0])


def test_pass_rates_of_answers(tmp_path: Path) -> None:
    """As `eval --answers` writes them."""
    ids = [f"eval-{n:04}" for n in range(3)]
    answers = tmp_path / "answers.jsonl"
    texts = [
        json.dumps({"set": "heldout", "mode": "sampled", "prompt_id": i, "reward": float(n < k)})
        for k, i in enumerate(ids)
        for n in range(2)
    ]
    answers.write_text("\n".join(texts) + "\n")
    out = called("stats", TINY / "heldout.jsonl", "--answers", answers)
    assert "pass rate: 0.5000 over 3 answered prompts" in out
    assert "strata: never 1, hard 0, medium 1, easy 0, always 1" in out


def a_run(where: Path, rewards: dict[str, Sequence[float]]) -> Path:
    (where / "rollouts").mkdir(parents=True)
    store_config(load_config(CONFIGS / "tiny.toml"), where / "config.toml")
    found = [json.dumps({"prompt_id": p, "reward": r}) for p, of in rewards.items() for r in of]
    (where / "rollouts" / "step_1.jsonl").write_text("\n".join(found) + "\n")
    return where


def test_hard_prompts_are_a_file_for_a_further_run(tmp_path: Path) -> None:
    """Its rows have the columns of the run's file, so the same configuration reads them."""
    run = a_run(tmp_path / "run", {"train-0002": [1, 0, 0, 0], "train-0001": [0, 0], "train-0000": [1, 1]})
    out = called("recycle", run, tmp_path / "hard.jsonl")
    assert "2 of the 3 prompts" in out
    of_file = {row["id"]: dict(row) for row in read_rows(str(TINY / "train.jsonl"))}
    hard = [dict(row) for row in read_rows(str(tmp_path / "hard.jsonl"))]
    added = [{"pass_rate": 0.0, "samples": 2, "last_step": 1}, {"pass_rate": 0.25, "samples": 4, "last_step": 1}]
    assert hard == [of_file[i] | more for i, more in zip(("train-0001", "train-0002"), added, strict=True)]
    out = called("check", tmp_path / "hard.jsonl", "--config", run / "config.toml")
    assert out.count("none") == 5
    nothing = called(
        "recycle", run, tmp_path / "no.jsonl", "--max-pass-rate", "0.6", "--min-pass-rate", "0.5", status=2
    )
    check_refusal(nothing, 3, "--max-pass-rate")
    check_refusal(called("recycle", tmp_path, tmp_path / "no.jsonl", status=2), "config.toml", tmp_path)
    assert not (tmp_path / "no.jsonl").exists()


def test_answers_are_rows_for_training(tmp_path: Path) -> None:
    """As `eval --answers` writes them; the rows have the columns of the file that was answered."""
    answers = tmp_path / "answers.jsonl"
    head = {"set": "heldout", "mode": "sampled", "finish": "stop"}
    texts = [
        json.dumps(head | {"prompt_id": f"eval-{n:04}", "response": text, "reward": reward})
        for n in range(3)
        for text, reward in (("1", 1.0), ("11", 0.0), ("12", 0.0))
    ]
    answers.write_text("\n".join(texts) + "\n")
    held = [dict(row) for row in read_rows(str(TINY / "heldout.jsonl"))][:3]
    out = called("pairs", TINY / "heldout.jsonl", tmp_path / "p.jsonl", "--answers", answers, "--per-prompt", 2)
    assert "6 pairs of 3 of the 3 answered prompts" in out
    pairs = [dict(row) for row in read_rows(str(tmp_path / "p.jsonl"))]
    assert [(p["id"], p["chosen"], p["rejected"]) for p in pairs[:2]] == [("eval-0000", "1", r) for r in ("11", "12")]
    out = called("best", TINY / "heldout.jsonl", tmp_path / "b.parquet", "--answers", answers)
    assert "3 answers of 3 of the 3 answered prompts" in out
    best = [dict(row) for row in read_rows(str(tmp_path / "b.parquet"))]
    assert best == [row | {"response": "1", "response_reward": 1.0} for row in held]
    words = ("pairs", TINY / "heldout.jsonl", tmp_path / "no.jsonl", "--answers", answers, "--min-gap", 2)
    check_refusal(called(*words, status=2), 3, "--min-gap", 2)
    check_refusal(called("best", TINY / "heldout.jsonl", tmp_path / "no.csv", "--answers", answers, status=2), ".jsonl")
    assert not list(tmp_path.glob("no.*"))


def test_nothing_is_left_of_a_command_that_fails(rows: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(rows.read_text() + "{\n")
    before = sorted(tmp_path.iterdir())
    for words in (("dedup", bad, tmp_path / "o.jsonl"), ("split", bad, tmp_path / "o"), ("stats", bad)):
        check_refusal(called(*words, status=2), "line 13", "JSON")
    check_refusal(called("dedup", rows, tmp_path / "o.csv", status=2), ".jsonl", ".parquet")
    check_refusal(called("dedup", rows, tmp_path / "o.jsonl", "--threshold", 2, status=2), "--threshold", 2)
    check_refusal(called("split", rows, tmp_path / "o", "--parts", "a=1", status=2), "--parts", 1)
    check_refusal(called("check", rows, "--reward", "exact_numbr", status=2), "exact_numbr", "exact_number")
    assert sorted(tmp_path.iterdir()) == before

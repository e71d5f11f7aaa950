"""What `miles-like init` writes is short, valid and complete, and nothing is written over.

Why it must hold: a new user begins with these files. That each runs: tests/e2e/test_python_runs.py.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from miles_like.cli import app
from miles_like.config.load import load_config
from miles_like.config.templates import TASKS, TEMPLATES, files_of, write_template
from tests.support.cli_runner import CliRunner
from tests.support.refusals import check_refusal

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_a_short_configuration_whose_files_are_beside_it(task: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["init", str(tmp_path / "a"), "--task", task])
    assert done.exit_code == 0 and f"miles-like train {tmp_path}/a/config.toml --run-dir runs/a" in done.stdout
    lines = [line for line in (tmp_path / "a" / "config.toml").read_text().splitlines() if line.strip()]
    assert len([line for line in lines if not line.startswith("#")]) <= 15
    config = load_config(tmp_path / "a" / "config.toml")
    named = [line.partition('"./')[2].partition('"')[0].partition(":")[0] for line in lines if '"./' in line]
    assert {"config.toml", *named} == {path.name for path in (tmp_path / "a").iterdir()} == set(files_of(task))
    train, held = (
        {json.loads(line)["prompt"] for line in Path(path).read_text().splitlines()}
        for path in (str(config.data.train), str(config.data.eval))
    )
    assert len(train) == 256 and len(held) == 64 and not train & held
    assert (config.servers is None) == (task == "sft") and config.rollout.has_episode_runner == (
        task in ("tool", "agent")
    )


def test_a_directory_with_something_in_it_and_an_unknown_task_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").write_text("1")
    refused = CliRunner().invoke(app, ["init", str(tmp_path / "a")])
    assert refused.exit_code == 2 and [p.name for p in (tmp_path / "a").iterdir()] == ["mine"]
    check_refusal(refused.stderr, tmp_path / "a", "empty")
    refused = CliRunner().invoke(app, ["init", str(tmp_path / "a" / "mine")])
    check_refusal(refused.stderr, tmp_path / "a" / "mine", "file")
    refused = CliRunner().invoke(app, ["init", str(tmp_path / "b"), "--task", "agnet"])
    check_refusal(refused.stderr, "'agnet'", "'agent'")
    assert not (tmp_path / "b").exists()
    (tmp_path / "empty").mkdir()
    assert write_template(tmp_path / "empty", "qa")


def test_the_rows_are_those_that_the_script_makes(tmp_path: Path) -> None:
    for folder in ("sums", "tool"):
        (tmp_path / folder).mkdir()
    runpy.run_path(str(ROOT / "scripts" / "make_template_data.py"))["main"](tmp_path)
    made = sorted(tmp_path.rglob("*.jsonl"))
    assert [p.relative_to(tmp_path) for p in made] == sorted(
        p.relative_to(TEMPLATES) for p in TEMPLATES.rglob("*.jsonl")
    )
    assert all(p.read_bytes() == (TEMPLATES / p.relative_to(tmp_path)).read_bytes() for p in made)


def test_no_held_out_product_is_in_the_tool_s_corpus() -> None:
    def shown(name: str) -> set[frozenset[str]]:
        rows = [json.loads(line) for line in (TEMPLATES / "tool" / name).read_text().splitlines()]
        return {frozenset(row["prompt"].partition("=")[0].split("*")) for row in rows}

    assert not shown("heldout.jsonl") & (shown("corpus.jsonl") | shown("train.jsonl"))

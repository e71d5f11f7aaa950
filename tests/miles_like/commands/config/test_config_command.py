"""What `miles-like config` prints, and its status.

Why it must hold: scripts read both. Not covered: the import of other projects' files, in
tests/miles_like/config/foreign.
"""

from __future__ import annotations

import tomllib

from miles_like.cli import app
from tests.support.cli_runner import CliRunner, Result
from tests.support.refusals import check_refusal

TINY = "configs/tiny.toml"


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["config", *words])


def test_show_prints_what_differs_and_where_it_was_set() -> None:
    done = run("show", TINY, "--set", "train.steps=3")
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and tomllib.loads(done.stdout)["train"] == {"steps": 3}
    assert [line.split() for line in lines if line.startswith("steps")] == [["steps", "=", "3", "#", "--set"]]
    assert [line.split("#")[1].strip() for line in lines if line.startswith("warmup_steps")] == [TINY]
    assert "groups_per_step" not in done.stdout
    every = run("show", TINY, "--all").stdout
    assert "groups_per_step = 64" in every and "# default" in every and "# cache_dir is not set" in every


def test_diff_has_status_1_where_something_differs() -> None:
    done = run("diff", TINY, "configs/tiny_qwen.toml")
    assert done.exit_code == 1 and done.stdout.splitlines()[0].split() == ["key", TINY, "configs/tiny_qwen.toml"]
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["model.path", "model.make.config"]
    same = run("diff", TINY, TINY)
    assert same.exit_code == 0 and same.stdout == ""


def test_explain_prints_a_key_or_a_section_without_marks() -> None:
    done = run("explain", "steps")
    assert [line.split()[0] for line in done.stdout.splitlines()[:4]] == ["train.steps", "type", "default", "meaning"]
    assert "`" not in done.stdout and "miles_like/run/train.py" in done.stdout
    assert run("explain", "critic").stdout.splitlines()[0] == "[critic]"


def test_mistakes_end_in_a_sentence() -> None:
    for words, facts in (
        (("show", "none.toml"), ("none.toml",)),
        (("show", TINY, "--set", "train.stps=1"), ("train.steps",)),
        (("diff", TINY, "none.toml"), ("none.toml",)),
        (("explain", "trian.steps"), ("train.steps",)),
    ):
        done = run(*words)
        assert done.exit_code == 2 and done.stdout == ""
        check_refusal(done.stderr, *facts)

"""`miles-like diagnose` and `track`, and the overrides that `train --profile` is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_like.cli import app
from miles_like.commands.options import profile_settings
from miles_like.config.load import load_config, store_config
from tests.support.cli_runner import CliRunner
from tests.support.refusals import check_refusal, refuses

TINY = Path(__file__).parents[4] / "configs" / "tiny.toml"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    store_config(load_config(TINY), tmp_path / "config.toml")
    row = {"step": 1, "perf/step_s": 4.0, "perf/train_s": 3.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_diagnose_prints_the_step(run_dir: Path) -> None:
    done = CliRunner().invoke(app, ["diagnose", str(run_dir)])
    assert done.exit_code == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["3.000", "1.000"]


def test_diagnose_names_a_sample_that_is_not_there(run_dir: Path) -> None:
    done = CliRunner().invoke(app, ["diagnose", str(run_dir), "--sample", "train-1/0"])
    assert done.exit_code == 2
    check_refusal(done.stderr, "train-1/0")


def test_track_needs_trackers(run_dir: Path) -> None:
    done = CliRunner().invoke(app, ["track", str(run_dir)])
    assert done.exit_code == 2
    check_refusal(done.stderr, "trackers.use", "--resume")


def test_profile_is_two_keys(run_dir: Path) -> None:
    settings = profile_settings(("steps=3:5", "ranks=0,1"))
    config = load_config(TINY, settings)
    assert (config.trace.profiled, config.trace.profile_ranks) == (range(3, 6), (0, 1))
    assert profile_settings(None) == []


@pytest.mark.parametrize(
    "given", [("steps=3:5", "rank=0"), ("steps=3", "ranks=a"), ("3:5", "0"), ("steps=1", "steps=2")]
)
def test_profile_of_another_form_is_refused(given: tuple[str, str]) -> None:
    with refuses(ValueError, "--profile", "steps=3:5", "ranks=0,7"):
        profile_settings(given)


def test_the_command_line_takes_both_words(run_dir: Path) -> None:
    done = CliRunner().invoke(
        app, ["train", str(TINY), "--run-dir", str(run_dir / "run"), "--profile", "steps=5:3", "ranks=0"]
    )
    assert done.exit_code == 2
    check_refusal(done.stderr, "trace.profile_steps", "'5:3'", "FIRST:LAST")

"""A run notes when, where and by which command it was started, and at which commit; its report shows all starts.

Why it must hold: a figure whose code and command are unknown cannot be made again. Not covered: changes of the work
tree that are not committed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from miles_like.page.write import write_report
from miles_like.report.provenance import STARTS, commit, note_start, starts
from tests.support.page_data import page_data


def test_each_start_is_a_line_and_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/bin/miles-like", "train", "my run.toml", "--set", "a=<b>"])
    before = datetime.now(UTC).replace(microsecond=0)
    note_start(tmp_path)
    (tmp_path / STARTS).write_text((tmp_path / STARTS).read_text() + '{"started": "cut sho\n[1]\n')
    note_start(tmp_path)
    first, second = starts(tmp_path)
    assert before <= datetime.fromisoformat(str(first["started"])) <= datetime.now(UTC)
    assert first["command"] == second["command"] == "miles-like train 'my run.toml' --set 'a=<b>'"
    assert (
        first["host"] and isinstance(first["versions"], dict) and {"python", "torch", "ray"} <= set(first["versions"])
    )
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "a": 1.0}) + "\n")
    shown = page_data(write_report(tmp_path).read_text())["runs"][0]["starts"]
    assert [one[2] for one in shown] == [first["command"]] * 2 and f"torch {first['versions']['torch']}" in shown[0][4]


def test_a_run_without_starts_has_none(tmp_path: Path) -> None:
    assert starts(tmp_path) == [] and commit(Path("/")) is None


@pytest.mark.slow  # git
def test_the_commit_is_the_one_that_git_names(tmp_path: Path) -> None:
    """On a branch, after refs are packed, in another work tree, detached, and in a directory below; none in a
    repository without a commit."""
    home = tmp_path / "repository"

    def git(*words: str, at: Path = home) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *author, *words], cwd=at, check=True, capture_output=True, text=True
        ).stdout.strip()

    home.mkdir()
    git("init", "--quiet", "--initial-branch", "feature/one")
    assert commit(home) is None
    git("commit", "--quiet", "--allow-empty", "--message", "one")
    (home / "a" / "b").mkdir(parents=True)
    assert commit(home) == commit(home / "a" / "b") == git("rev-parse", "HEAD")
    git("worktree", "add", "--quiet", "-b", "two", str(tmp_path / "tree"))
    git("commit", "--quiet", "--allow-empty", "--message", "two", at=tmp_path / "tree")
    assert commit(tmp_path / "tree") == git("rev-parse", "two") != commit(home)
    git("pack-refs", "--all")
    assert (commit(home), commit(tmp_path / "tree")) == (git("rev-parse", "feature/one"), git("rev-parse", "two"))
    git("checkout", "--quiet", "--detach", "two")
    assert commit(home) == git("rev-parse", "two")

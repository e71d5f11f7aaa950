"""`miles-like servers` shows what a run has reported, and appends what users ask of it."""

from __future__ import annotations

from pathlib import Path

from miles_like.cli import app
from miles_like.fleet.control import ControlFiles, Request
from miles_like.fleet.roster import Roster
from miles_like.fleet.states import Event
from tests.support.cli_runner import CliRunner, Result
from tests.support.refusals import check_refusal


def servers(*words: str) -> Result:
    return CliRunner().invoke(app, ["servers", *words])


def test_states_are_listed_and_requests_reach_the_run(tmp_path: Path) -> None:
    files, roster = ControlFiles(tmp_path), Roster(limit=3, window_s=60.0, least=1, say=str)
    roster.start(["http://a", "http://b"], 4)
    roster.move(roster.servers[1], Event.FAILED, "ended with signal SIGKILL")
    files.write(roster.rows())
    head, *rows = servers("list", str(tmp_path)).stdout.splitlines()
    assert head.split() == ["server", "state", "version", "restarts_left", "url", "why"]
    assert [row.split() for row in rows] == [
        ["0", "healthy", "4", "3", "http://a"],
        ["1", "dead", "3", "http://b", "ended", "with", "signal", "SIGKILL"],
    ]
    assert servers("add", str(tmp_path)).exit_code == servers("remove", str(tmp_path), "1").exit_code == 0
    assert files.asked() == [Request("add"), Request("remove", 1)] and files.asked() == []
    assert ControlFiles(tmp_path).asked() == [], "of an earlier process"


def test_a_run_that_has_ended_or_reports_nothing_is_asked_nothing(tmp_path: Path) -> None:
    refused = servers("add", str(tmp_path))
    assert refused.exit_code == 2 and not list(tmp_path.iterdir())
    check_refusal(refused.stderr, "--run-dir", "rollout.restarts", unrecorded="a temporary directory")
    ControlFiles(tmp_path).write([], ended=True)
    refused = servers("remove", str(tmp_path), "0")
    assert refused.exit_code == 2 and not (tmp_path / "servers" / "requests.jsonl").exists()
    check_refusal(refused.stderr, "--resume", "ended", unrecorded="a temporary directory")

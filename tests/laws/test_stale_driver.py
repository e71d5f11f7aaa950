"""Law: a driver that was stopped, and whose successor has finished the run, changes no byte of it when it comes back.

The driver is stopped by SIGSTOP in mid-run, as a machine that is cut off stands still for the others. Another start
continues the run to its end, as on a file system whose lock did not hold: no lock is taken here. Then the first gets
SIGCONT: it has its ranks, its server and its open files, and must end by saying that it is stale. Meanwhile its
successor must have left the run that nothing had disturbed.

Not covered: another machine, whose file system may see a new epoch later (docs/reliability.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.forked import redirect, tail
from tests.support.local_run import Runs, drive, untimed

STEPS, STOPPED_AFTER = 7, 3
SETTINGS = (f"train.steps={STEPS}", "checkpoint.every=1", "buffer.max_staleness=1")
NO_STATE = ("logs", "driver.log", "first.log", "second.log")


def _forked(log: Path, run: Callable[[], int]) -> int:
    pid = os.fork()
    if not pid:
        redirect(log, 1, 2)
        os._exit(run())
    return pid


def _hashes(run_dir: Path) -> dict[str, str]:
    paths = [p for p in sorted(run_dir.rglob("*")) if p.is_file()]
    named = {str(p.relative_to(run_dir)): p for p in paths}
    return {
        name: hashlib.sha256(p.read_bytes()).hexdigest()
        for name, p in named.items()
        if name.split("/")[0] not in NO_STATE
    }


def stop_and_continue(run_dir: Path, home: Path, settings: Sequence[str]) -> int:
    """The two drivers, as children of this process, which has no threads; what was seen goes to a file beside."""
    run_dir.mkdir()
    first = _forked(run_dir / "first.log", lambda: drive(run_dir, home, settings, None))
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) <= STOPPED_AFTER:
        assert os.waitpid(first, os.WNOHANG) == (0, 0), tail(run_dir / "first.log")
        time.sleep(0.005)
    os.kill(first, signal.SIGSTOP)
    os.waitpid(first, os.WUNTRACED)
    rows = len(metrics.read_text().splitlines())
    second = _forked(run_dir / "second.log", lambda: drive(run_dir, home, settings, None))
    _, status = os.waitpid(second, 0)
    after = _hashes(run_dir)
    os.kill(first, signal.SIGCONT)
    _, stale = os.waitpid(first, 0)
    now = _hashes(run_dir)
    seen = {
        "rows": rows,
        "second": os.waitstatus_to_exitcode(status),
        "first": os.waitstatus_to_exitcode(stale),
        "files": len(after),
        "changed": sorted(name for name in after.keys() | now.keys() if after.get(name) != now.get(name)),
        "last_line": tail(run_dir / "first.log", 1),
    }
    (run_dir.parent / "seen.json").write_text(json.dumps(seen))
    return 0


@pytest.mark.slow
def test_a_driver_that_comes_back_after_its_successor_changes_nothing(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        log, run_dir, whole = tmp_path / "both.log", tmp_path / "run", tmp_path / "whole"
        assert runs.run(whole, SETTINGS) == 0, tail(whole / "driver.log")
        assert runs.call(log, stop_and_continue, run_dir, tmp_path, SETTINGS) == 0, tail(log)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert STOPPED_AFTER < seen["rows"] <= STEPS, "stopped in mid-run"
    assert seen["second"] == 0, tail(run_dir / "second.log")
    assert seen["first"] == 2 and "epoch 1" in seen["last_line"] and "epoch 2 has begun" in seen["last_line"], seen
    assert seen["changed"] == [] and seen["files"] > 20
    assert (run_dir / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    assert untimed(run_dir / "metrics.jsonl") == untimed(whole / "metrics.jsonl")

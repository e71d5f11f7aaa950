"""A driver that dies is started again and continues its run; one that says why it ends is not.

Drivers are small programs that tell how they were started and end as planned; a whole run is in
tests/e2e/test_faults.py. Not covered: a supervisor that is itself killed on a system other than Linux.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from miles_like.launch.supervise import Restarts, Supervisor, restart_words
from miles_like.stopping import command_began
from miles_like.storage.fencing import Fence
from miles_like.variables import COMMAND_BEGAN
from tests.support.fakes import wait_until

# the driver: notes its words, begins the run where the plan has a path, and ends by the plan of this start
DRIVER = """
import json, os, signal, sys, time
from pathlib import Path
where, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
starts = where / "starts"
n = len(starts.read_text().splitlines()) if starts.exists() else 0
with starts.open("a") as out:
    out.write(json.dumps([sys.argv[3:], os.environ["MILES_LIKE_COMMAND_BEGAN"], os.getpid()]) + "\\n")
how = plan[min(n, len(plan) - 1)]
if isinstance(how, str):
    sys.path.insert(0, how)
    from miles_like.storage.fencing import Fence
    Fence.begin(where).begins(0)
    os.kill(os.getpid(), signal.SIGKILL)
if how is None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (where / "ready").touch()
    time.sleep(60)
if how < 0:
    os.kill(os.getpid(), -how)
sys.exit(how)
"""
ROOT = str(Path(__file__).parents[3])


class Supervised:
    """A supervisor of drivers that end by `plan`: a status, minus a signal, a path (begins the run, then SIGKILL), or
    None (waits)."""

    def __init__(self, where: Path, plan: Sequence[Any], *words: str, most: int = 3, window_s: float = 60.0) -> None:
        self.where, self.sentences = where, list[str]()
        self.supervisor = Supervisor(
            words=[sys.executable, "-S", "-c", DRIVER, str(where), json.dumps(plan), "--supervise", *words],
            run_dir=where,
            restarts=Restarts(most=most, window_s=window_s, wait_s=0.01),
            say=self.sentences.append,
        )

    def run(self) -> int:
        return self.supervisor.run()

    @property
    def starts(self) -> list[Any]:
        return [json.loads(line) for line in (self.where / "starts").read_text().splitlines()]


@pytest.mark.parametrize("status", [0, 2, 3, 75, 130, 143])
def test_a_status_that_the_driver_gives_is_passed_on(tmp_path: Path, status: int) -> None:
    """2: an error that would come again; 75: the machine's time is over, and the batch system starts it again."""
    one = Supervised(tmp_path, [status])
    assert one.run() == status
    assert [words for words, *_ in one.starts] == [[]] and not one.sentences


def test_a_driver_that_dies_is_started_again_until_it_ends(tmp_path: Path) -> None:
    """Before its run has begun with the same words; afterwards with --resume. The deadline counts from the first."""
    one = Supervised(tmp_path, [-9, ROOT, 1, 0], "--fresh", "--set", "a=1", most=3)
    before = time.time()
    assert one.run() == 0
    again = ["--set", "a=1", "--resume"]
    assert [words for words, *_ in one.starts] == [["--fresh", "--set", "a=1"]] * 2 + [again] * 2
    (began,) = {began for _, began, _ in one.starts}
    assert before - 1 < float(began) < time.time()
    assert (
        "SIGKILL" in one.sentences[0]
        and "restart 1 of 3" in one.sentences[0]
        and "from the beginning" in one.sentences[0]
    )
    assert "--resume" in one.sentences[1] and "status 1" in one.sentences[2] and len(one.sentences) == 3


def test_a_run_that_was_there_before_is_not_resumed_in_place_of_a_fresh_one(tmp_path: Path) -> None:
    Fence.begin(tmp_path).begins(40)
    one = Supervised(tmp_path, [-9, 2], "--fresh")
    assert one.run() == 2
    assert [words for words, *_ in one.starts] == [["--fresh"]] * 2


def test_the_budget_is_of_a_window_and_its_end_is_named(tmp_path: Path) -> None:
    one = Supervised(tmp_path, [-11], most=2)
    assert one.run() == 128 + signal.SIGSEGV
    assert len(one.starts) == 3
    assert "checkpoint.restarts = 2 within 60 s" in one.sentences[-1] and "SIGSEGV" in one.sentences[-1]
    spread = Supervised(tmp_path / "b", [-9, -9, -9, -9, 0], most=1)
    (tmp_path / "b").mkdir()
    times = iter(range(0, 1000, 61))
    spread.supervisor.clock = lambda: float(next(times))
    assert spread.run() == 0 and len(spread.starts) == 5


def test_no_restart_is_made_where_none_is_allowed(tmp_path: Path) -> None:
    one = Supervised(tmp_path, [-9], most=0)
    assert one.run() == 137 and len(one.starts) == 1


def test_a_signal_is_passed_on_once_and_ends_the_supervisor(tmp_path: Path) -> None:
    one = Supervised(tmp_path, [None])
    sender = threading.Thread(
        target=lambda: wait_until((tmp_path / "ready").exists, 30) and os.kill(os.getpid(), signal.SIGTERM)
    )
    sender.start()
    before = signal.getsignal(signal.SIGTERM)
    assert one.run() == 143
    sender.join()
    assert signal.getsignal(signal.SIGTERM) is before and len(one.starts) == 1


def test_a_driver_does_not_outlive_its_supervisor(tmp_path: Path) -> None:
    """The kernel sends it SIGTERM, on which a run saves."""
    program = (
        "import sys; from pathlib import Path\n"
        f"sys.path.insert(0, {ROOT!r})\n"
        "from miles_like.launch.supervise import Restarts, Supervisor\n"
        f"words = [sys.executable, '-S', '-c', {DRIVER!r}, {str(tmp_path)!r}, '[null]']\n"
        f"limits = Restarts(most=1, window_s=60, wait_s=1)\n"
        f"Supervisor(words=words, run_dir=Path({str(tmp_path)!r}), restarts=limits, say=print).run()\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program])
    assert wait_until((tmp_path / "ready").exists, 60)
    supervisor.kill()
    supervisor.wait()
    pid = json.loads((tmp_path / "starts").read_text())[2]
    assert wait_until(lambda: not Path(f"/proc/{pid}").exists() or _is_dead(pid), 30)


def _is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_words_that_a_restart_would_repeat_are_left_out() -> None:
    words = ["python", "-m", "miles_like", "train", "c.toml", "--supervise", "--from-step", "4", "--run-dir", "d"]
    assert restart_words(words, resume=False) == [w for w in words if w != "--supervise"]
    assert restart_words(words, resume=True) == [*words[:5], "--run-dir", "d", "--resume"]
    assert restart_words(["x", "--from-step=4", "--resume", "--no-fresh"], resume=True) == ["x", "--resume"]


def test_the_deadline_counts_from_the_start_of_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_like.stopping._call_began", None)  # a run that another test began by a call
    monkeypatch.setenv(COMMAND_BEGAN, "1000.5")
    assert command_began() == 1000.5

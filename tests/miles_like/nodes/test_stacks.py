"""Which rank the others wait for, from the stacks that processes write themselves and those that py-spy reads.

The stacks are of real processes in tests/miles_like/cluster/test_workers.py; here they are as both programs print them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles_like.nodes import stacks
from miles_like.nodes.stacks import Frame, Stacks, place_of, read_stacks, root_of, threads_of, waits, write_report
from tests.support.fakes import wait_until

RANK = '  File "/srv/miles_like/cluster/rank.py", line 90 in evaluate'
C10D = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
SIGNALS = "/srv/megatron_bridge/device/signals.py"


def written(*inner: str) -> str:
    """As faulthandler writes a rank's stacks: a thread that only waits, then that of the call."""
    idle = 'Thread 0x00007f01 (most recent call first):\n  File "/env/lib/python3.11/threading.py", line 327 in wait\n'
    lines = "\n".join(f'  File "{file}", line {line} in {name}' for file, line, name in map(str.split, inner))
    return f"{idle}\nCurrent thread 0x00007f02 (most recent call first):\n{lines}\n{RANK}\n"


def of(text: str, state: str = "S") -> Stacks:
    return Stacks("node0", 7, state, text)


COLLECTIVE = written(f"{C10D} 2810 all_reduce", f"{C10D} 83 wrapper", "/srv/megatron_bridge/step/step.py 44 reduce")
MEETING = written(f"{SIGNALS} 60 wait_for", f"{SIGNALS} 88 meet")
USERS = written("/env/lib/python3.11/site-packages/numpy/core.py 3 dot", "/home/me/reward.py 12 slow")
SPIED = """Process 26206: python reward.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 26206 (active): "MainThread"
    <lambda> (/home/me/re (1)ward.py:12)
    evaluate (/srv/miles_like/cluster/rank.py:90)
Thread 26208 (idle): "Thread-1 (<lambda>)"
    Thread.run (/env/lib/python3.11/threading.py:982)
"""


def test_frames_of_both_forms_are_read() -> None:
    assert [len(t) for t in threads_of(USERS)] == [1, 3]
    assert threads_of(SPIED)[0][0] == Frame("/home/me/re (1)ward.py", 12, "<lambda>")
    assert place_of(USERS) == Frame("/home/me/reward.py", 12, "slow")  # not the library's line that it calls
    assert place_of(SPIED) == Frame("/home/me/re (1)ward.py", 12, "<lambda>")
    assert waits(COLLECTIVE) and waits(MEETING) and not waits(USERS) and not waits(SPIED)
    assert place_of("") is None and not waits("no stack\n")


def test_a_collective_in_a_thread_of_the_backward_pass_is_one() -> None:
    backward = written("/env/lib/python3.11/site-packages/torch/autograd/graph.py 841 _engine_run_backward")
    thread = f'\nThread 0x00007f09 (most recent call first):\n  File "{C10D}", line 2810 in all_reduce\n'
    assert waits(backward + thread) and not waits(backward)


def test_the_rank_outside_of_collectives_is_the_root() -> None:
    found = {0: of(COLLECTIVE), 1: of(USERS), 2: of(MEETING)}
    assert root_of(found) == (
        "rank 1 is outside of collectives at /home/me/reward.py:12 in slow, while 2 ranks wait in one"
    )


def test_a_rank_that_is_gone_or_stopped_is_the_root_whatever_the_stacks_are() -> None:
    assert root_of({0: of(USERS), 1: of(COLLECTIVE, "T")}).startswith("rank 1 had been stopped by a signal at ")
    assert root_of({0: of(USERS, "T"), 1: of("", "?")}) == "rank 1 is gone"


def test_where_all_are_in_collectives_the_one_in_another_is_the_root() -> None:
    other = written(f"{C10D} 2900 barrier", "/srv/megatron_bridge/step/step.py 60 save")
    assert root_of({i: of(COLLECTIVE if i != 2 else other) for i in range(4)}) == (
        "rank 2 is at /srv/megatron_bridge/step/step.py:60 in save, 3 ranks at "
        "/srv/megatron_bridge/step/step.py:44 in reduce"
    )
    assert root_of({0: of(COLLECTIVE), 1: of(other)}) == ""  # neither is usual
    assert root_of({0: of(COLLECTIVE), 1: of(COLLECTIVE)}) == root_of({}) == ""


def test_the_report_has_every_process_and_the_driver_and_replaces_none(tmp_path: Path) -> None:
    found = {"trainer rank 0": of(COLLECTIVE), "trainer rank 1": of("")._replace(note="py-spy is not installed")}
    paths = [write_report(tmp_path / "stacks", "trainer_train", "train: too late", found) for _ in range(2)]
    assert paths == [tmp_path / "stacks" / f"trainer_train_{n}.txt" for n in (1, 2)]
    text = (tmp_path / "stacks" / "trainer_train_1.txt").read_text()
    assert text.startswith("train: too late\n") and COLLECTIVE in text and "(py-spy is not installed)" in text
    assert f"driver, process {os.getpid()}" in text and Path(__file__).name in text
    (tmp_path / "file").write_text("")
    assert write_report(tmp_path / "file", "x", "x", {}) is None


PROGRAM = "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1, file=2); print(flush=True)\n"


DENIED = "echo 'Error: Operation not permitted (os error 1)' >&2; exit 1"


@pytest.mark.slow
@pytest.mark.parametrize("spy", ["absent", DENIED, f"cat <<'END'\n{SPIED}END"])
def test_a_process_that_py_spy_may_not_read_writes_its_own_stacks(
    tmp_path: Path, spy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped one too. Where py-spy reads it, these are kept."""
    program, log = tmp_path / "py-spy", tmp_path / "log"
    program.write_text(f"#!/bin/sh\n{spy}\n")
    program.chmod(0o755)
    monkeypatch.setattr(stacks.shutil, "which", lambda name, path=None: None if spy == "absent" else str(program))
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", f"{PROGRAM}time.sleep(60)"], stdout=subprocess.PIPE, stderr=out
        )
    try:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: "T" in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2], 10)
        found = read_stacks([(3, process.pid, log)])[3]
    finally:
        process.kill()
        process.communicate()
    assert (found.pid, found.state) == (process.pid, "T")
    if spy.startswith("cat"):
        assert (found.text, found.note) == (SPIED, "")
    else:
        assert 'File "<string>", line ' in found.text and "most recent call first" in log.read_text()
        assert ("not installed" if spy == "absent" else "SYS_PTRACE") in found.note

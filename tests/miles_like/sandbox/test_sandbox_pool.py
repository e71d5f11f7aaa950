"""The pool of sandboxes: how programs end, what stays apart, and that nothing outlives the process.

Not covered: speed (benchmarks/sandbox.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_like.sandbox.config import SandboxConfig
from miles_like.sandbox.make import make_pool, try_sandbox
from miles_like.sandbox.pool import SandboxPool
from miles_like.sandbox.program import Program, SandboxLost, Status
from tests.support.debian import need_programs
from tests.support.refusals import refuses

LIMITS = SandboxConfig(kind="bwrap", slots=2, memory_mb=128, cpu_s=1, wall_s=2.5, output_kb=8, disk_mb=4)
ROOT = Path(__file__).parents[3]
THREADS = "import atexit, threading\natexit.register(print, 2)\nthreading.Thread(target=print, args=(1,)).start()"
MAIN = "import dataclasses\n@dataclasses.dataclass\nclass A:\n    n: int\nprint(A(1), __name__)"


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    need_programs("bwrap", "setpriv")
    made = make_pool(LIMITS)
    yield made
    made.end()


@pytest.mark.parametrize(
    ("code", "status", "number", "out"),
    [
        ("print('é')", Status.EXIT, 0, "é\n"),
        ("import sys; sys.exit(7)", Status.EXIT, 7, ""),
        ("import sys; sys.exit('no')", Status.EXIT, 1, ""),
        ("1 / 0", Status.EXIT, 1, ""),
        ("import os; os.kill(os.getpid(), 11)", Status.SIGNAL, 11, ""),
        (THREADS, Status.EXIT, 0, "1\n2\n"),
        (MAIN, Status.EXIT, 0, "A(n=1) __main__\n"),
        ("while True: pass", Status.TIME, -1, ""),  # at the limit of processor time
        ("print('x' * 9000)", Status.OUTPUT, -1, "x" * 8192),
    ],
)
def test_how_a_program_ends(code: str, status: Status, number: int, out: str, pool: SandboxPool) -> None:
    ran = pool.run_now(Program(code=code))
    assert (ran.status, ran.code, ran.stdout) == (status, number, out), ran


def test_a_program_has_its_files_and_its_input(pool: SandboxPool) -> None:
    code = "import sys, os\nfrom a.b import c\nprint(c, sys.stdin.read(), sorted(os.listdir('.')))"
    files = {"a/b.py": b"c = 3", "d.bin": bytes(1000)}
    stdin = os.urandom(300_000).hex().encode()  # more than a pipe holds
    ran = pool.run_now(
        Program(code=code.replace("sys.stdin.read()", "len(sys.stdin.read())"), files=files, stdin=stdin)
    )
    assert ran.stdout == "3 600000 ['a', 'd.bin']\n", ran
    ran = pool.run_now(
        Program(argv=("python", "-c", "import sys; print(sys.argv[1:], open('x').read())", "q"), files={"x": b"y"})
    )
    assert ran.stdout == "['q'] y\n", ran
    assert pool.run_now(Program(argv=("no-such-program",))).code == 1


def test_a_closed_pool_runs_no_program_that_waits() -> None:
    need_programs("bwrap", "setpriv")
    pool = make_pool(LIMITS.model_copy(update={"slots": 1}))

    async def run() -> list[object]:
        program = Program(code="import time; time.sleep(0.5)")
        asked = [asyncio.create_task(pool.run(program)) for _ in range(3)]
        await asyncio.sleep(0)  # they wait
        await pool.close()
        return await asyncio.gather(*asked, return_exceptions=True)

    assert [type(one) for one in asyncio.run(run())] == [SandboxLost] * 3


def test_a_traceback_shows_the_program_alone(pool: SandboxPool) -> None:
    ran = pool.run_now(Program(code="def f():\n    return 1 / 0\nf()"))
    assert 'File "main.py", line 2, in f' in ran.stderr and "return 1 / 0" in ran.stderr
    assert ran.stderr.count("File ") == 2


def test_hashes_of_text_do_not_depend_on_the_sandbox(pool: SandboxPool) -> None:
    """The same program prints the same in every slot and every run."""
    other = make_pool(LIMITS.model_copy(update={"runs_per_sandbox": 1, "slots": 1}))
    try:
        texts = {p.run_now(Program(code="print({'a', 'b', 'c', 'd'})")).stdout for p in (pool, other) for _ in range(3)}
    finally:
        other.end()
    assert len(texts) == 1


def test_programs_run_side_by_side_and_a_cancelled_one_ends(pool: SandboxPool) -> None:
    async def both() -> float:
        began = time.monotonic()
        slow = asyncio.ensure_future(pool.run(Program(code="import time; time.sleep(1.9)")))
        assert (await pool.run(Program(code="print(1)"))).stdout == "1\n"
        took = time.monotonic() - began
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert (await asyncio.gather(*(pool.run(Program(code="print(2)")) for _ in range(4))))[3].stdout == "2\n"
        return took

    assert asyncio.run(both()) < 1.9


def test_a_lost_sandbox_is_replaced_and_one_that_is_lost_twice_is_an_error(pool: SandboxPool) -> None:
    ran = pool.run_now(Program(code="print(1)"))
    for slot in pool._slots:
        slot.kill()
    assert pool.run_now(Program(code="print(1)")).stdout == ran.stdout
    broken = make_pool(LIMITS.model_copy(update={"python": "/usr/bin/false", "slots": 1}))
    try:
        with refuses(SandboxLost, "status", 1):
            broken.run_now(Program(code="print(1)"))
    finally:
        broken.end()


def test_a_sandbox_that_is_ended_at_its_start_leaves_no_process() -> None:
    """bubblewrap's child waits for bubblewrap for ever where that is killed first."""
    for looks in range(12):
        pool = make_pool(LIMITS.model_copy(update={"slots": 1}))
        job = pool._begin(Program(code="print(1)"))
        while pool._slots[0]._box is None:
            time.sleep(0.0005)
        box = pool._slots[0]._box
        assert box is not None
        below = {box._process.pid}
        for _ in range(looks):
            below |= set(_descendants(box._process.pid))
        job.cancel()
        pool.end()
        assert not outlive(sorted(below))


def test_what_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with refuses(ValueError, "bwrap", "apt-get", "bubblewrap"):
        try_sandbox(LIMITS)
    with refuses(ValueError, "docker", "docker.io"):
        try_sandbox(SandboxConfig(kind="docker", image="python:3.12"))
    with refuses(ValueError, "gvisor", "runsc"):
        try_sandbox(SandboxConfig(kind="gvisor"))
    with refuses(ValueError, "sandbox.kind", "bubblewrap"):
        try_sandbox(SandboxConfig())


def test_files_that_exceed_the_disk_are_refused(pool: SandboxPool) -> None:
    with refuses(ValueError, "sandbox.disk_mb", 4, "4,194,305"):
        pool.run_now(Program(code="1", files={"a": bytes((4 << 20) + 1)}))
    with refuses(ValueError, "'../a'"):
        Program(code="1", files={"../a": b""})


def test_this_machine_runs_one() -> None:
    try_sandbox(SandboxConfig(kind="bwrap"))


OWNER = """
import sys, threading
from miles_like.sandbox.config import SandboxConfig
from miles_like.sandbox.make import make_pool
from miles_like.sandbox.program import Program
pool = make_pool(SandboxConfig(kind="bwrap", slots=2, wall_s=60))
code = "import os, time\\nopen('/tmp/left', 'w').close()\\nos.setsid() if os.fork() == 0 else 0\\ntime.sleep(50)"
for _ in range(2):
    threading.Thread(target=pool.run_now, args=(Program(code=code),), daemon=True).start()
pool.run_now  # both slots run
threading.Event().wait()
"""


def test_nothing_is_left_when_the_owner_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], env=environment)
    try:
        below = descendants(owner.pid, 8)  # bwrap, the first process, the program and its child, twice
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert not outlive(below) and not list(tmp_path.rglob("*"))


def descendants(pid: int, least: int) -> list[int]:
    """Processes that descend from `pid`, as soon as there are `least`."""
    until = time.monotonic() + 60
    while len(found := _descendants(pid)) < least:
        assert time.monotonic() < until, found
        time.sleep(0.05)
    return found


def outlive(processes: list[int]) -> list[int]:
    """Those that still run after a while, which is shorter than the programs are."""
    until = time.monotonic() + 25
    while (left := [pid for pid in processes if _runs(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    out, todo = [], [pid]
    while todo:
        below = parents.get(todo.pop(), [])
        out += below
        todo += below
    return out


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

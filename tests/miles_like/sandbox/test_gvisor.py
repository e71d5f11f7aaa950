"""The gVisor sandbox: programs, some of the attacks, and that nothing outlives the process.

Not covered: the attacks that only the bubblewrap sandbox is held to (test_attacks.py); runsc itself.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_like.sandbox.config import SandboxConfig
from miles_like.sandbox.judging import judge, read_tests
from miles_like.sandbox.make import make_pool
from miles_like.sandbox.pool import SandboxPool
from miles_like.sandbox.program import Program
from tests.miles_like.sandbox.test_sandbox_pool import OWNER, ROOT, descendants, outlive
from tests.support.attacks import PROBE, Attack, attacks
from tests.support.debian import need_programs

LIMITS = SandboxConfig(kind="gvisor", slots=1, memory_mb=160, cpu_s=2, wall_s=5.0, disk_mb=8)
CHOSEN = {
    *("memory of many processes", "sleep", "endless output", "a full disk", "writing /usr", "reading the host"),
    *("a link to the host", "the network", "other processes", "a signal to the first process", "an orphan"),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    need_programs("runsc")
    made = make_pool(LIMITS)
    yield made
    made.end()


@pytest.mark.parametrize("attack", [a for a in attacks() if a.name in CHOSEN], ids=lambda a: a.name)
def test_an_attack_is_held_and_leaves_nothing(attack: Attack, pool: SandboxPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = attack.code.replace("PORT", str(server.getsockname()[1]))
        ran = pool.run_now(Program(code=code, wall_s=0.4 if attack.ends == "time" else None))
    refused = "PermissionError" in ran.stderr
    assert ran.status == attack.ends and "BROKEN" not in ran.stdout, ran
    assert attack.ends != "exit" or refused or "HELD" in ran.stdout, ran
    assert pool.run_now(Program(code=PROBE)).stdout == "clean\n"


def test_descriptors_of_the_first_process_cannot_be_opened(pool: SandboxPool) -> None:
    code = """
import os
for fd in range(2, 8):  # its errors, the pipes to it, and streams
    for flags in (os.O_RDONLY, os.O_WRONLY):
        try: print('BROKEN', os.open(f'/proc/1/fd/{fd}', flags | os.O_NONBLOCK))
        except OSError: pass
print(os.getuid())
"""
    assert pool.run_now(Program(code=code)).stdout == ("60000\n" if os.geteuid() == 0 else "0\n")


def test_a_program_owns_its_files_and_tests_judge_it(pool: SandboxPool) -> None:
    ran = pool.run_now(Program(code="open('a/b', 'w').write('2'); print(open('a/b').read())", files={"a/b": b"1"}))
    assert ran.stdout == "2\n", ran
    tests = read_tests(["assert f(1) == 2", "def test_it():\n    assert f(2) == 3", "assert f(1) == 1"])
    assert asyncio.run(judge(pool, "def f(n): return n + 1", tests)).passed == 2


def test_nothing_is_left_when_the_owner_is_killed(tmp_path: Path) -> None:
    need_programs("runsc")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    code = OWNER.replace('kind="bwrap", slots=2, wall_s=60', 'kind="gvisor", slots=2, wall_s=3').replace("50", "2")
    owner = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        below = descendants(owner.pid, 6)  # runsc, its gofer, and the sandbox, twice
    finally:
        owner.kill()
        owner.wait()
    assert not outlive(below)
    kept = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert kept == {"config.json"}, "the bundle, which the next process uses again"

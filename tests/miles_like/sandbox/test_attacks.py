"""Attacks on the bubblewrap sandbox: each is held, and the next program in its slot sees nothing of it.

Not covered: flaws of the kernel; channels by time and load between slots.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from miles_like.sandbox.config import SandboxConfig
from miles_like.sandbox.make import make_pool
from miles_like.sandbox.pool import SandboxPool
from miles_like.sandbox.program import Program
from tests.support.attacks import PROBE, Attack, attacks
from tests.support.debian import need_programs

pytestmark = pytest.mark.slow

LIMITS = SandboxConfig(kind="bwrap", slots=1, memory_mb=160, cpu_s=1, wall_s=4.0, processes=16, disk_mb=8)


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    need_programs("bwrap", "setpriv")
    made = make_pool(LIMITS)
    yield made
    made.end()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("attack", attacks(), ids=lambda a: a.name)
def test_an_attack_is_held_and_leaves_nothing(attack: Attack, pool: SandboxPool, port: int) -> None:
    ran = pool.run_now(
        Program(code=attack.code.replace("PORT", str(port)), wall_s=0.4 if attack.ends == "time" else None)
    )
    if attack.ends == "exit":
        held = "HELD" in ran.stdout or (attack.name == "a zip bomb" and "File too large" in ran.stderr)
        assert ran.status == "exit" and held and "BROKEN" not in ran.stdout, ran
    elif attack.ends != "any":
        assert ran.status == attack.ends, ran
    assert pool.run_now(Program(code=PROBE)).stdout == "clean\n"


def test_an_attack_costs_no_more_than_its_time(pool: SandboxPool) -> None:
    """The sandbox is not lost, for which a program would go without a score."""
    programs = [
        "import os\nos.makedirs('/tmp/a/b'); open('/tmp/a/x', 'w').close()\nprint(os.getpid())",
        "import os\nfor n in range(1, 64): os.kill(1, n)\nprint(os.getpid())",
        "import os\nprint(os.getpid())",
    ]
    first, *others = (int(pool.run_now(Program(code=code)).stdout) for code in programs)
    assert others == [first + 1, first + 2], "of one PID namespace"

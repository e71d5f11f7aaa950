"""The system call filter, executed as the kernel would: which calls it refuses, allows, and by which arguments."""

from __future__ import annotations

import errno
import struct

import pytest

from miles_like.sandbox.seccomp import refused_calls, seccomp_filter

ALLOW, KILL = 0x7FFF0000, 0x80000000
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {  # clone, clone3, socket, ioctl, prlimit64, sched_setaffinity, and some of every program
    "x86_64": (56, 435, 41, 16, 302, 203, (0, 1, 3, 9, 39, 59, 60, 231)),
    "aarch64": (220, 435, 198, 29, 261, 122, (63, 64, 57, 222, 172, 221, 93, 94)),
}


def answer(code: bytes, machine: str, number: int, *arguments: int) -> int:
    """What the filter gives for a call: a classic BPF machine over struct seccomp_data."""
    words = [*arguments, *([0] * (6 - len(arguments)))]
    data = struct.pack("<iIQ6Q", number, ARCHITECTURE[machine], 0, *words)
    program = [struct.unpack("HBBI", code[k : k + 8]) for k in range(0, len(code), 8)]
    at, held = 0, 0
    while True:
        op, yes, no, operand = program[at]
        at += 1
        if op == 0x20:
            (held,) = struct.unpack_from("<I", data, operand)
        elif op == 0x06:
            return int(operand)
        else:
            at += yes if {0x15: held == operand, 0x35: held >= operand, 0x45: bool(held & operand)}[op] else no


def refused(number: int) -> int:
    return 0x50000 | number


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_calls(machine: str) -> None:
    code = seccomp_filter(machine)
    assert len(code) // 8 < 4096  # BPF_MAXINSNS
    assert len(set(refused_calls(machine).values())) == len(refused_calls(machine)) > 50
    for name, number in refused_calls(machine).items():
        assert answer(code, machine, number) == refused(errno.EPERM), name
    clone, clone3, socket, ioctl, prlimit, affinity, plain = CALLS[machine]
    assert all(answer(code, machine, number) == ALLOW for number in plain)
    assert answer(code, machine, clone3) == refused(errno.ENOSYS)
    assert answer(code, machine, clone, 0x01200011) == ALLOW  # of fork
    assert all(answer(code, machine, clone, 1 << bit) == refused(errno.EPERM) for bit in (17, 25, 26, 27, 28, 29, 30))
    assert [answer(code, machine, socket, family) == ALLOW for family in (1, 2, 10, 16, 17, 40)] == [True] * 3 + [
        False
    ] * 3
    assert answer(code, machine, prlimit, 0) == ALLOW and answer(code, machine, prlimit, 1) == refused(errno.EPERM)
    assert answer(code, machine, affinity, 0) == ALLOW and answer(code, machine, affinity, 1) == refused(errno.EPERM)
    assert answer(code, machine, ioctl, 1, 0x5401) == ALLOW and answer(code, machine, ioctl, 1, 0x5412) != ALLOW


def test_other_architectures_end_the_process_and_x32_is_refused() -> None:
    code = seccomp_filter("x86_64")
    assert answer(code, "aarch64", 0) == KILL
    assert answer(code, "x86_64", 0x40000000 | 101) == refused(errno.EPERM)
    assert seccomp_filter("riscv64") == b""

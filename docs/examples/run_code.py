"""A reward that runs the model's program under limits: 1 when it prints the answer, else 0.

    [reward]
    name = "./run_code.py:prints_the_answer"
    timeout_s = 60

The program runs in a separate process with an empty environment, in new user, PID, network, IPC and mount namespaces:
it has no network, sees no other process and no /proc, and cannot start a process (threads it can). It has CPU seconds,
address space, file size and open files up to the limits below, and WALL_S seconds until it is killed. Where the system
grants no namespaces or no system call filter (some containers), the run ends with one sentence before a program is run.

What this does not protect from: it reads every file that your user may read, and those your user may write it can
change; a flaw of the kernel is a way out. For programs of a model that you do not trust, use the reward `remote` with a
machine that holds no secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:  # the file is also the program that sets the limits, which starts without miles_like
    from miles_like.protocols import SampleReward
    from miles_like.types import Prompt, Sample

WALL_S = 10.0
LIMITS = {
    resource.RLIMIT_CPU: 5,  # seconds
    resource.RLIMIT_AS: 1 << 30,  # bytes
    resource.RLIMIT_FSIZE: 1 << 20,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
}
MOST_PROGRAM, MOST_OUTPUT = 100_000, 65_536  # bytes
NOT_GRANTED = 97  # exit status

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38  # linux/prctl.h
SECCOMP_MODE_FILTER, CLONE_THREAD = 2, 0x10000  # linux/seccomp.h, linux/sched.h
# machine -> AUDIT_ARCH_* of linux/audit.h; numbers of clone, clone3 and, where they exist, fork and vfork
SYSTEM_CALLS = {"x86_64": (0xC000003E, 56, 435, (57, 58)), "aarch64": (0xC00000B7, 220, 435, ())}
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000  # linux/mount.h
NAMESPACES = 0x20000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000  # linux/sched.h: NS, IPC, USER, PID, NET


async def prints_the_answer(prompt: Prompt, sample: Sample) -> float:
    """Protocol: SampleReward. The whole response is the program; its output, stripped, is compared with the answer.

    The program cannot forge the verdict by its exit status: only the right output scores. Raises RuntimeError where
    the system grants no namespaces.
    """
    program = sample.text.encode()
    if len(program) > MOST_PROGRAM or b"\0" in program:
        return 0.0
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", os.path.abspath(__file__), str(os.getpid())),
        env={},
        start_new_session=True,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdin is not None and process.stdout is not None
    out, code = b"", -1
    try:
        async with asyncio.timeout(WALL_S):
            with contextlib.suppress(ConnectionError):
                process.stdin.write(program)
                process.stdin.close()
            while len(out) <= MOST_OUTPUT and (some := await process.stdout.read(MOST_OUTPUT)):
                out += some
            if len(out) <= MOST_OUTPUT:
                code = await process.wait()
    except TimeoutError:
        pass
    finally:  # also where the run is ended: the first process of the PID namespace ends with this group, all with it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.stdout.read()  # what is left in the pipe: asyncio's wait() returns only at its end
        await process.wait()
    if code == NOT_GRANTED:
        raise RuntimeError(
            "this system grants no user namespaces or no seccomp filter, so programs cannot be isolated: "
            "use the reward 'remote'"
        )
    return float(code == 0 and out.decode(errors="replace").strip() == prompt.answer.strip())


# the program that sets the limits: python run_code.py PARENT_PID < PROGRAM


def shut_in(parent: int) -> int:
    """Run standard input as a Python program in new namespaces. Returns its exit status, or NOT_GRANTED."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        return 1
    program = sys.stdin.buffer.read()
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NAMESPACES):
        return NOT_GRANTED
    with open("/proc/self/setgroups", "w") as file:
        file.write("deny")
    # not as root within: the program has no capability, so it cannot undo the mounts
    for name, number in (("uid_map", user), ("gid_map", group)):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(f"1000 {number} 1")
    hidden = [(b"/proc", b"size=4k"), (b"/dev/shm", b"size=16m,mode=777")]
    mounted = [libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)]
    mounted += [libc.mount(b"tmpfs", at, b"tmpfs", MS_NOSUID | MS_NODEV, size) for at, size in hidden]
    if any(mounted):
        return NOT_GRANTED
    child = os.fork()
    if child == 0:
        run(libc, program.decode(errors="replace"))
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), -1) & 0xFF


def run(libc: ctypes.CDLL, program: str) -> NoReturn:
    """Become the program: the first process of the PID namespace."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # and with this process all others of its namespace
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.setsid()
    os.chdir("/dev/shm")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for which, most in LIMITS.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
    if not forbid_processes(libc):
        os._exit(NOT_GRANTED)
    os.execve(sys.executable, [sys.executable, "-I", "-c", program], {})


def forbid_processes(libc: ctypes.CDLL) -> bool:
    """Let this process start threads, but no process. RLIMIT_NPROC would not: it does not bind root, and containers run
    as root. Returns whether the kernel took the filter."""
    if platform.machine() not in SYSTEM_CALLS:
        return False
    arch, clone, clone3, forks = SYSTEM_CALLS[platform.machine()]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
    allow, deny, unknown, kill = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
    # (code, jump if true, jump if false, operand); seccomp_data is nr, arch, instruction pointer, arguments
    head = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    tests = [(at_least, 0x40000000), *((equal, nr) for nr in forks)]  # first: the x32 variants of all calls
    body = [(code, len(tests) - i + 4, 0, operand) for i, (code, operand) in enumerate(tests)]
    tail = [
        (equal, 5, 0, clone3),  # unknown: glibc takes clone, whose flags a filter can read
        (equal, 0, 2, clone),
        (load, 0, 0, 16),
        (any_bit, 0, 1, CLONE_THREAD),
        (give, 0, 0, allow),
        (give, 0, 0, deny),
        (give, 0, 0, unknown),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in head + body + tail)
    held = ctypes.create_string_buffer(code)
    filter_ = struct.pack("HP", len(code) // 8, ctypes.addressof(held))
    return bool(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_, 0, 0) == 0)


if __name__ == "__main__":
    sys.exit(shut_in(int(sys.argv[1])))


_: SampleReward = prints_the_answer  # mypy holds it to its Protocol here

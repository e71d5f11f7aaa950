"""The first process inside a sandbox: it forks for each program, and nothing of a program is left after it.

`python -s -B -c SOURCE_OF_THIS_FILE`, Python 3.10 or later, standard library only; pool.py is the other side. A request
is [length of a JSON object][length of standard input][object][standard input], lengths as uint32; a reply is
[length][object]. The first object has the limits and the system call filter; the others a program.

As process 1 of its PID namespace no program can end it: signals from inside do not reach it, since it handles none. It
is not dumpable, so that /proc/1 is closed to programs of the same user. Standard input goes from pipe to memory file in
the kernel (splice) and never through this process, whose memory a program gets a copy of by fork.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import ctypes
import json
import linecache
import os
import resource
import select
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
import types
from typing import Any, NoReturn

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38  # linux/prctl.h
TICK_S = 0.02  # between looks at a program's output and memory
MOST_LEFT = 2000  # files that are removed after a program; with more the sandbox is replaced
WORK, WRITABLE = "/tmp", ("/tmp", "/dev/shm")
FILE = "main.py"  # of the program, in tracebacks
# signals that the first process ignores: gVisor delivers them to it. Python ignores SIGPIPE and SIGXFSZ anyway; without
# SIGCHLD's default no end could be waited for
HANDLED = signal.valid_signals() - {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ),
    *range(32, signal.SIGRTMIN),
}


def exactly(source: int, n: int) -> bytes:
    """The next `n` bytes. Ends this process where the other side has closed the pipe."""
    out = b""
    while len(out) < n:
        some = os.read(source, n - len(out))
        if not some:
            os._exit(0)
        out += some
    return out


def reply(to: int, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    body = struct.pack("<I", len(body)) + body
    while body:
        body = body[os.write(to, body) :]


def protect(code: bytes) -> bool:
    """Install the filter for this process and all after it. Returns whether the kernel took it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if not code:
        return False
    held = ctypes.create_string_buffer(code)
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(held))
    return bool(libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0) == 0)


def moved(source: int, to: int, n: int) -> None:
    """Move `n` bytes from a pipe to a memory file; none of them passes through the memory of this process."""
    try:
        while n:
            n -= os.splice(source, to, n)
    except OSError:  # gVisor cannot: another process copies what is left
        child = os.fork()
        if child == 0:
            while n:
                n -= os.write(to, exactly(source, min(n, 1 << 16)))
            os._exit(0)
        os.waitpid(child, 0)


class Inside:
    """limits: memory, cpu, processes, disk (bytes or numbers), output (bytes of both streams together); user: that
    programs become, 0: they stay this process's."""

    def __init__(self, limits: dict[str, int], requests: int) -> None:
        self.limits, self.requests = limits, requests
        self.files = [os.memfd_create(name) for name in ("in", "out", "err")]
        if limits["user"]:  # gVisor lets every user open what is not denied by its mode in /proc/1/fd
            for f in self.files:
                os.fchmod(f, 0o600)

    def run(self, program: dict[str, Any], stdin: int) -> dict[str, Any]:
        began = time.monotonic()
        for f in self.files:
            os.ftruncate(f, 0)
            os.lseek(f, 0, os.SEEK_SET)
        moved(self.requests, self.files[0], stdin)
        os.lseek(self.files[0], 0, os.SEEK_SET)
        self.write(program["files"])
        child = os.fork()
        if child == 0:
            self.become(program)
        how = self.watch(child, began + program["wall"])
        status, used = end_all(child)
        code = -1
        if how == "exit":
            how, code = self.judged(status, used)
        texts, left = [], self.limits["output"]
        for f in self.files[1:]:
            texts.append(os.pread(f, max(left, 0), 0))
            left -= os.fstat(f).st_size
        if left < 0:
            how, code = "output", -1
        if how == "exit" and code and texts[1].strip().rpartition(b"\n")[2].startswith(b"MemoryError"):
            how, code = "memory", -1
        out, err = (base64.b64encode(text).decode() for text in texts)
        seconds = time.monotonic() - began
        return {"how": how, "code": code, "out": out, "err": err, "seconds": seconds, "clean": cleaned()}

    def write(self, files: dict[str, str]) -> None:
        """Write the files of a program, relative path -> base64, which are its user's."""
        for path, content in files.items():
            where = os.path.join(WORK, path)
            os.makedirs(os.path.dirname(where), exist_ok=True)
            with open(where, "wb") as file:
                file.write(base64.b64decode(content))
        if files and self.limits["user"]:
            for root, folders, names in os.walk(WORK):
                for name in (*folders, *names):
                    os.chown(os.path.join(root, name), self.limits["user"], self.limits["user"])

    def watch(self, child: int, until: float) -> str:
        """Wait for the program's first process. Returns why it must be ended; "exit": it has ended."""
        ended = select.poll()
        ended.register(self.requests, 0)  # it hangs up when the process that owns the sandbox ends
        try:
            handle = os.pidfd_open(child)
            ended.register(handle, select.POLLIN)
        except OSError:  # gVisor has no such descriptors
            handle = -1
        try:
            while True:
                tick = max(min(until - time.monotonic(), TICK_S), 0.0)
                found = dict(ended.poll(tick * 1000 if handle >= 0 else 0))
                if found.get(self.requests, 0) & select.POLLHUP:
                    os._exit(0)
                if handle in found or (handle < 0 and has_ended(child, tick)):
                    return "exit"
                if time.monotonic() >= until:
                    return "time"
                if sum(os.fstat(f).st_size for f in self.files[1:]) > self.limits["output"]:
                    return "output"
                if resident() > self.limits["memory"]:
                    return "memory"
        finally:
            if handle >= 0:
                os.close(handle)

    def judged(self, status: int, used: float) -> tuple[str, int]:
        """How a process with this wait status has ended, which needed `used` seconds of a processor."""
        if not os.WIFSIGNALED(status):
            return "exit", os.WEXITSTATUS(status)
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU or (number == signal.SIGKILL and used >= self.limits["cpu"]):
            return "time", -1
        return "signal", number

    def become(self, program: dict[str, Any]) -> NoReturn:
        """Be the program."""
        code = 1
        try:
            os.setsid()
            for to, f in enumerate(self.files):
                os.dup2(f, to)
            os.closerange(3, 256)
            os.chdir(WORK)
            for which, most in (
                (resource.RLIMIT_AS, self.limits["memory"]),
                (resource.RLIMIT_NPROC, self.limits["processes"] + 1),  # and the first process
                (resource.RLIMIT_FSIZE, self.limits["disk"]),
                (resource.RLIMIT_NOFILE, 256),
                (resource.RLIMIT_CORE, 0),
            ):
                resource.setrlimit(which, (most, most))
            resource.setrlimit(resource.RLIMIT_CPU, (self.limits["cpu"], self.limits["cpu"] + 1))
            for number in HANDLED:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.limits["user"]:
                os.setgroups([])
                os.setgid(self.limits["user"])
                os.setuid(self.limits["user"])
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
            if program["argv"]:
                execute(program["argv"])
            code = interpreted(program["code"])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def execute(argv: list[str]) -> NoReturn:
    """Be another program. Raises OSError where there is none of this name."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    os.execvp(sys.executable if argv[0] == "python" else argv[0], argv)


def interpreted(code: str) -> int:
    """Run Python as the main module. Returns its exit status."""
    main = types.ModuleType("__main__")
    main.__dict__["__file__"] = FILE
    sys.modules["__main__"], sys.argv, sys.path[0:1] = main, [FILE], [WORK]
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    status = 0
    try:
        exec(compile(code, FILE, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as e:
        if e.code is not None and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException as e:
        status = 1
        traceback.print_exception(type(e), e, e.__traceback__ and e.__traceback__.tb_next)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads, as the end of an interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status & 0xFF


def has_ended(child: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= until:
            return False
        time.sleep(0.001)
    return True


def resident() -> int:
    """Bytes of memory of all processes but this one, without files."""
    pages = 0
    for name in os.listdir("/proc"):
        if name.isdecimal() and name != "1":
            try:
                with open(f"/proc/{name}/statm") as file:
                    numbers = file.read().split()
            except OSError:  # it has ended
                continue
            pages += int(numbers[1]) - int(numbers[2])
    return pages * resource.getpagesize()


def end_all(child: int) -> tuple[int, float]:
    """End every process but this one. Returns the wait status of `child`, and the processor seconds that it needed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    status, used = 0, 0.0
    while True:
        try:
            pid, one, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return status, used
        if pid == child:
            status, used = one, usage.ru_utime + usage.ru_stime


def cleaned() -> bool:
    """Empty the writable directories. Returns False where that takes long or fails: the sandbox is then replaced."""
    seen = 0
    try:
        for root in WRITABLE:
            for where, folders, files in os.walk(root):
                seen += len(folders) + len(files)
                if seen > MOST_LEFT or len(where) > 1000:
                    return False
            for entry in list(os.scandir(root)):
                shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
        return not any(os.listdir(root) for root in WRITABLE)
    except (OSError, RecursionError):
        return False


def main() -> None:
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0), os.dup2(null, 1)
    os.close(null)
    size, _ = struct.unpack("<II", exactly(requests, 8))
    hello = json.loads(exactly(requests, size))
    inside = Inside(hello["limits"], requests)
    reply(replies, {"filtered": protect(base64.b64decode(hello["filter"])), "clean": cleaned()})
    while True:
        size, stdin = struct.unpack("<II", exactly(requests, 8))
        reply(replies, inside.run(json.loads(exactly(requests, size)), stdin))


if __name__ == "__main__":
    main()

"""The Python stacks of processes that do not answer, and which of several ranks the others wait for.

On the processes' node py-spy reads their stacks from outside, where it is installed (the extra `stacks`) and the kernel
lets it: it also shows a process that is stopped. In any case each process writes its stacks to the end of its log, by a
handler of SIGUSR1 that it has registered with faulthandler.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_WRITTEN_S = 10.0  # for processes to write their stacks
_SPY_S = 10.0
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
# files of a rank's stack: of the call that it works on; of waits for other ranks
_CALL = "miles_like/cluster/rank.py"
_WAITS = ("torch/distributed/distributed_c10d.py", "megatron_bridge/device/signals.py", "torch/cuda/streams.py")
_BACKWARD = "_engine_run_backward"  # runs in C++ threads of a GPU
_LIBRARIES = re.compile(r"/(lib/python3[^/]*|site-packages|dist-packages)/")
_FRAMES = (
    re.compile(r"^    (?P<function>\S.*?) \((?P<file>.+):(?P<line>\d+)\)$"),  # of py-spy
    re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$'),  # of faulthandler
)
_THREAD = re.compile(r"^(Current thread|Thread) ")


class Frame(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Stacks(NamedTuple):
    """Of one process. text: of all its threads; "" where it could not be read."""

    host: str
    pid: int
    state: str  # before they were read, a letter of Linux's /proc: "T" stopped by a signal, "?" gone
    text: str
    note: str = ""  # why py-spy did not read them; "" where it has


def read_stacks(processes: Sequence[tuple[int, int, Path]]) -> dict[int, Stacks]:
    """Runs on the processes' node. processes: (number, pid, log) of each. Sends SIGUSR1, and SIGCONT too, because a
    stopped process writes nothing."""
    found, sizes = {}, {}
    for i, pid, log in processes:
        text, note = _spied(pid)
        found[i] = Stacks(socket.gethostname(), pid, _state(pid), text, note)
        with contextlib.suppress(OSError):
            with log.open("a") as out:
                out.write(
                    f"the stacks of process {pid}, which exceeded its time limit or waits for a process that did:\n"
                )
            sizes[log] = log.stat().st_size
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + _WRITTEN_S
    while time.monotonic() < deadline and any(log.stat().st_size == size for log, size in sizes.items()):
        time.sleep(0.05)
    time.sleep(0.2)  # for stacks that are being written
    for i, _, log in processes:
        if not found[i].text and log in sizes:
            found[i] = found[i]._replace(text=_written(log, sizes[log]))
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "?"  # no such process, or no Linux


def _spied(pid: int) -> tuple[str, str]:
    """(what py-spy reads, "") or ("", why it does not)."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return "", "py-spy is not installed"
    command = [program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SPY_S)
    except (OSError, subprocess.TimeoutExpired) as e:
        return "", f"py-spy: {type(e).__name__}"
    if not done.returncode:
        return done.stdout, ""
    if re.search(r"permi(ssion|tted)", done.stderr, re.IGNORECASE):
        scope = f" (kernel.yama.ptrace_scope = {_SCOPE.read_text().strip()})" if _SCOPE.exists() else ""
        return "", f"py-spy may not read process {pid}{scope}: it needs the capability SYS_PTRACE"
    return "", f"py-spy: {(done.stderr.strip().splitlines() or ['no output'])[0]}"


def _written(log: Path, begin: int) -> str:
    with contextlib.suppress(OSError), log.open("rb") as f:
        f.seek(begin)
        return f.read(1 << 20).decode("utf-8", "replace")
    return ""


def threads_of(text: str) -> list[list[Frame]]:
    """The frames of each thread, the innermost first."""
    out: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            out.append([])
        elif out and (found := next((m for form in _FRAMES if (m := form.match(line))), None)) is not None:
            out[-1].append(Frame(found["file"], int(found["line"]), found["function"]))
    return out


def call_of(text: str) -> list[Frame]:
    """The frames of the call that a rank works on, the innermost first; none where it works on none."""
    return next((t for t in threads_of(text) if any(f.file.endswith(_CALL) for f in t)), [])


def waits(text: str) -> bool:
    """Whether a rank's call is in a collective, or waits for a signal of another rank."""
    call = call_of(text)
    threads = threads_of(text) if call and call[0].function == _BACKWARD else [call]
    return any(f.file.endswith(_WAITS) for thread in threads for f in thread)


def place_of(text: str) -> Frame | None:
    """Where a rank's call is: the innermost frame outside of libraries, or else the innermost."""
    call = call_of(text)
    return next((f for f in call if not _LIBRARIES.search(f.file)), call[0] if call else None)


def root_of(ranks: Mapping[int, Stacks]) -> str:
    """Which rank the others wait for, with its place, as words that follow a semicolon; "" where none stands out.

    A process that is gone, one that was stopped by a signal, one whose call is outside of collectives while another's
    is in one; else the one whose place differs from that of most.
    """
    found = {i: (s.state, place_of(s.text)) for i, s in ranks.items()}
    for letters, what in (("?", "is gone"), ("Tt", "had been stopped by a signal")):
        if halted := [i for i, (state, _) in found.items() if state in letters]:
            return "; ".join(f"rank {i} {what}{_at(found[i][1])}" for i in halted)
    waiting = {i for i, s in ranks.items() if waits(s.text)}
    outside = [i for i, (_, place) in found.items() if place is not None and i not in waiting]
    if waiting and outside:
        return "; ".join(
            f"rank {i} is outside of collectives{_at(found[i][1])}, while {_counted(len(waiting), 'rank')} "
            f"{'wait' if len(waiting) > 1 else 'waits'} in one"
            for i in outside[:3]
        )
    places = Counter(place for _, place in found.values() if place is not None)
    if len(places) < 2:
        return ""
    usual, count = places.most_common()[0]
    apart = [i for i, (_, place) in found.items() if place not in (None, usual)]
    if 2 * count <= sum(places.values()):
        return ""
    return "; ".join(f"rank {i} is{_at(found[i][1])}, {_counted(count, 'rank')}{_at(usual)}" for i in apart[:3])


def _at(place: Frame | None) -> str:
    return "" if place is None else f" at {place}"


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n > 1)}"


def write_report(directory: Path, name: str, head: str, found: Mapping[str, Stacks]) -> Path | None:
    """Writes `head`, the stacks of processes by their names and those of this process to a new file NAME_N.txt of the
    directory; None where it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = next(p for n in range(1, 10_000) if not (p := directory / f"{name}_{n}.txt").exists())
        with path.open("x", encoding="utf-8") as out:
            out.write(f"{head}\n")
            for name_of, s in found.items():
                out.write(f"\n==== {name_of}, process {s.pid} on {s.host}, state {s.state}\n")
                out.write(s.text or "its stacks could not be read\n")
                out.write(f"({s.note})\n" if s.note else "")
            out.write(f"\n==== driver, process {os.getpid()} on {socket.gethostname()}\n")
            out.writelines(_own_stacks())
        return path
    except OSError:
        return None


def _frames() -> Mapping[int, FrameType]:
    """The frame of each thread. Without a garbage collection: Python before 3.13 holds a lock meanwhile for which a
    thread that begins or ends waits, and the collection may wait for that thread (python/cpython#106883)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _own_stacks() -> Iterator[str]:
    """The stacks of this process, as faulthandler writes them, the main thread's first. It writes 100 threads, of which
    the main one would be the last."""
    main, names = threading.main_thread().ident, {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sorted(_frames().items(), key=lambda item: item[0] != main):
        yield f"Thread 0x{ident:08x} [{names.get(ident, '')}] (most recent call first):\n"
        for at, line in traceback.walk_stack(frame):
            yield f'  File "{at.f_code.co_filename}", line {line} in {at.f_code.co_name}\n'
        yield "\n"

"""`python -m rollout.guard PARENT_PID [--foreign] [--secrets A,B] [--modules DIR] COMMAND...`: run a server that must
not outlive the process that started it.

The guard leads a separate process group, checks twice a second whether its parent is still the process that started
it, and kills the group when it is not. Linux's PR_SET_PDEATHSIG needs no extra process, but it fires when the *thread*
that started the child ends, and an actor's method may run in any thread. The guard starts its server in its main
thread and does use PR_SET_PDEATHSIG, for the case that the guard itself is killed: Ray kills the children of a worker
whose driver has gone, which are the guards.

If the environment has a server key, or variables whose names follow `--secrets`, the server's output passes through the
guard, which redacts their values: stock SGLang logs all its arguments, and logs outlive the run.

With `--foreign` the command's first word is the Python of another virtual environment than the guard's. With
`--modules` it also finds the modules of a folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO, NamedTuple

from miles_like.limits.child_process import die_with_parent
from miles_like.variables import environment_of
from rollout.server_key import ServerKey, environment_with, inherited_key

_POLL_S = 0.5
_GRACE_S = 5.0
_LINE = 1 << 20  # bytes of a line to wait for before it is written
_DRAIN_S = 2.0  # to copy the last output of a server that has ended
_SHORTEST = 4  # characters of a secret that is redacted: a shorter one is part of too many words


class Task(NamedTuple):
    parent: int
    foreign: bool
    secrets: tuple[str, ...]  # names
    command: list[str]
    modules: str = ""  # "": none

    @classmethod
    def read(cls, words: Sequence[str]) -> Task:
        parent, *rest = words
        foreign = rest[0] == "--foreign"
        rest = rest[foreign:]
        secrets = rest[1].split(",") if rest[0] == "--secrets" else []
        rest = rest[2:] if secrets else rest
        modules = rest[1] if rest[0] == "--modules" else ""
        return cls(int(parent), foreign, tuple(secrets), rest[2:] if modules else rest, modules)

    def words(self) -> list[str]:
        secrets = ["--secrets", ",".join(self.secrets)] if self.secrets else []
        modules = ["--modules", self.modules] if self.modules else []
        return [str(self.parent), *(["--foreign"] if self.foreign else []), *secrets, *modules, *self.command]


def _copy(output: IO[bytes], key: ServerKey | None, secrets: Sequence[bytes]) -> None:
    """Copy the server's output to stdout line by line, with the key and the secrets redacted."""
    while line := output.readline(_LINE):
        line = line if key is None else key.redact(line)
        for secret in secrets:
            line = line.replace(secret, b"<secret>")
        with contextlib.suppress(OSError):  # with a full disk, keep reading: a full pipe would block the server
            os.write(1, line)


def _paths(first: str, environment: Mapping[str, str]) -> list[str]:
    return [first, *filter(None, [environment.get("PYTHONPATH")])]


def main() -> int:
    task = Task.read(sys.argv[1:])
    key = inherited_key()
    environment = environment_with(key)
    if task.foreign:
        environment = environment_of(task.command[0], environment)
    if task.modules:
        environment = {**environment, "PYTHONPATH": os.pathsep.join(_paths(task.modules, environment))}
    values = [environment[name].encode() for name in task.secrets if len(environment[name]) >= _SHORTEST]
    redacts = key is not None or bool(values)
    # SIGTERM is sent to the whole group. The guard ignores it, to report how the server ended.
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(
        task.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if redacts else None,
        stderr=subprocess.STDOUT if redacts else None,
        env=environment,
        preexec_fn=partial(die_with_parent, os.getpid()),  # in the main thread: the signal fires when the guard ends
    )
    copying = threading.Thread(target=_copy, args=(child.stdout, key, values), daemon=True)
    if redacts:
        copying.start()
    while os.getppid() == task.parent:
        try:
            code = child.wait(_POLL_S)
            if redacts:
                copying.join(_DRAIN_S)
            return code if code >= 0 else 128 - code  # the exit code a shell reports for a signal
        except subprocess.TimeoutExpired:
            continue
    print(
        f"process {task.parent}, which started this server, has ended: stopping the server", file=sys.stderr, flush=True
    )
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)  # also processes that the server has started, and the guard itself
    return 1


if __name__ == "__main__":
    sys.exit(main())

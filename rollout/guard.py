"""`python -m rollout.guard PARENT_PID COMMAND...`: run a server that must not outlive the process that started it.

The guard leads a separate process group, checks twice a second whether its parent is still the process that started
it, and kills the group when it is not. Linux's PR_SET_PDEATHSIG needs no extra process, but it fires when the *thread*
that started the child ends, and an actor's method may run in any thread. The guard starts its server in its main
thread and does use PR_SET_PDEATHSIG, for the case that the guard itself is killed: Ray kills the children of a worker
whose driver has gone, which are the guards.

If the environment has a server key, the server's output passes through the guard, which redacts the key: stock SGLang
logs all its arguments, and logs outlive the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import IO

from miles_like.limits.child_process import die_with_parent
from rollout.server_key import ServerKey, environment_with, inherited_key

_POLL_S = 0.5
_GRACE_S = 5.0
_LINE = 1 << 20  # bytes of a line to wait for before it is written
_DRAIN_S = 2.0  # to copy the last output of a server that has ended


def _copy(output: IO[bytes], key: ServerKey) -> None:
    """Copy the server's output to stdout line by line, with the key redacted."""
    while line := output.readline(_LINE):
        with contextlib.suppress(OSError):  # with a full disk, keep reading: a full pipe would block the server
            os.write(1, key.redact(line))


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    key = inherited_key()
    # SIGTERM is sent to the whole group. The guard ignores it, to report how the server ended.
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=None if key is None else subprocess.PIPE,
        stderr=None if key is None else subprocess.STDOUT,
        env=environment_with(key),
        preexec_fn=partial(die_with_parent, os.getpid()),  # in the main thread: the signal fires when the guard ends
    )
    copying = threading.Thread(target=_copy, args=(child.stdout, key), daemon=True)
    if key is not None:
        copying.start()
    while os.getppid() == parent:
        try:
            code = child.wait(_POLL_S)
            if key is not None:
                copying.join(_DRAIN_S)
            return code if code >= 0 else 128 - code  # the exit code a shell reports for a signal
        except subprocess.TimeoutExpired:
            continue
    print(f"process {parent}, which started this server, has ended: stopping the server", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)  # also processes that the server has started, and the guard itself
    return 1


if __name__ == "__main__":
    sys.exit(main())

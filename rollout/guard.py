"""`python -m rollout.guard PARENT_PID COMMAND...`: runs a server that must not outlive the process that started it.

The guard leads a process group of its own and asks twice a second whether its parent is still the one that started it;
when not, it ends the group. Linux's PR_SET_PDEATHSIG would do it without a process, but fires when the *thread* that
started the child ends, and an actor's method may run in any thread. Between the guard, which has one thread, and its
server it does no harm, and is needed: Ray kills the children of a worker whose driver is gone, the guard before others.

Where the environment has a server key, the server's output goes through the guard, which strikes the key out: stock
SGLang logs all its arguments, and logs outlive the run.
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

from miles_like.child_limits import end_with
from rollout.server_key import ServerKey, environment_with, inherited_key

_POLL_S = 0.5
_GRACE_S = 5.0
_LINE = 1 << 20  # bytes of a line that are held back for the rest of it
_DRAIN_S = 2.0  # for what the server wrote last


def _copy(output: IO[bytes], key: ServerKey) -> None:
    """The server's output to this process's, by lines, without the key."""
    while line := output.readline(_LINE):
        with contextlib.suppress(OSError):  # a full disk must not fill the pipe, on which the server would then wait
            os.write(1, key.struck_out(line))


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    key = inherited_key()
    # A stop is sent to the whole group: the guard outlasts it, to report how the server ended.
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=None if key is None else subprocess.PIPE,
        stderr=None if key is None else subprocess.STDOUT,
        env=environment_with(key),
        preexec_fn=partial(end_with, os.getpid()),  # in the thread that starts it, which is this process's first
    )
    copying = threading.Thread(target=_copy, args=(child.stdout, key), daemon=True)
    if key is not None:
        copying.start()
    while os.getppid() == parent:
        try:
            code = child.wait(_POLL_S)
            if key is not None:
                copying.join(_DRAIN_S)
            return code if code >= 0 else 128 - code  # as a shell says that a signal ended it
        except subprocess.TimeoutExpired:
            continue
    print(f"process {parent}, which started this server, is gone: ending", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)  # what the server has started too; the guard itself ends here
    return 1


if __name__ == "__main__":
    sys.exit(main())

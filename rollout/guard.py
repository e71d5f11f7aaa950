"""`python -m rollout.guard PARENT_PID COMMAND...`: runs a server that must not outlive the process that started it.

The guard leads a process group of its own and asks twice a second whether its parent is still the one that started it;
when not, it ends the group. Linux's PR_SET_PDEATHSIG would do it without a process, but fires when the *thread* that
started the child ends, and an actor's method may run in any thread. Between the guard, which has one thread, and its
server it does no harm, and is needed: Ray kills the children of a worker whose driver is gone, the guard before others.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

_POLL_S = 0.5
_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _die_with_parent() -> None:
    """Of the server, before it is one. Elsewhere than on Linux it outlives a guard that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    # A stop is sent to the whole group: the guard outlasts it, to report how the server ended.
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    while os.getppid() == parent:
        try:
            code = child.wait(_POLL_S)
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

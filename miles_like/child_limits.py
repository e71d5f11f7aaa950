"""Limits that a worker process gives itself. The standard library alone: such a process starts without torch."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with(parent: int) -> None:
    """Be killed when the parent ends, however it does. It may be gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this worker is gone")


def lower(which: int, to: int) -> None:
    """The soft limit, within the hard one that the process has."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (to if hard == resource.RLIM_INFINITY else min(to, hard), hard))

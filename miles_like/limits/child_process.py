"""Limits that a worker process sets on itself. Standard library only: such a process starts without torch."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends; exit at once where the parent has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this worker has ended")


def set_soft_limit(which: int, to: int) -> None:
    """Set the soft limit of resource `which`, at most to the hard limit."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (to if hard == resource.RLIM_INFINITY else min(to, hard), hard))

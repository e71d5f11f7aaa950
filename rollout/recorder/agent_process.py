"""Starts an agent's program, which the kernel ends when the run's process ends.

    python -I -S agent_process.py PARENT PROGRAM ARGUMENTS...

Standard library only: it is run by its path, before each episode of an agent.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(parent: int, words: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # execve keeps it
    if os.getppid() == parent:
        os.execvp(words[0], words)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

"""Starts an agent's program, and ends its process group when the run's process ends.

    python -I -S agent_process.py PARENT PROGRAM ARGUMENTS...

Leader of the group, with the exit status of the program. Standard library only: it is run by its path, before each
episode of an agent.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(parent: int, words: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            os.execvp(words[0], words)
        finally:
            os._exit(127)
    for stream in (0, 1):  # the program's: the other ends see when it closes them
        os.close(stream)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

"""Stops processes and lets them go on: `slow` for 90 ms of every 100 ms, `partition` once for the whole time.

    python -S -E throttle.py slow|partition SECONDS PID ...

A process that is stopped answers nothing and asks nothing; what is sent to it waits in its sockets, as after a
partition that has ended. A program of the standard library alone, which starts in 20 ms.
"""

import os
import signal
import sys
import time


def send(pids: list[int], how: signal.Signals) -> bool:
    """Whether one of them is there."""
    left = False
    for pid in pids:
        try:
            os.kill(pid, how)
            left = True
        except ProcessLookupError:
            continue
    return left


def main(how: str, seconds: float, pids: list[int]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and send(pids, signal.SIGSTOP):
        time.sleep(0.09 if how == "slow" else seconds)
        send(pids, signal.SIGCONT)
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), [int(pid) for pid in sys.argv[3:]])

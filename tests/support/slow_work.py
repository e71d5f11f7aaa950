"""Work on numbers that is slow, or hangs. In a separate module, so that Ray's processes find it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


class Slow:
    """Writes a file for each number; number 1 hangs as `how` says."""

    def __init__(self, where: Path, how: str = "", each_s: float = 0.0) -> None:
        self.where, self.how, self.each_s = where, how, each_s

    def __call__(self, number: int) -> None:
        (self.where / f"{number}.pid").write_text(str(os.getpid()))
        if number == 1 and self.how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if number == 1 and self.how:
            self.hang_here()
        time.sleep(self.each_s)
        (self.where / str(number)).touch()

    def hang_here(self) -> None:
        while True:
            time.sleep(1)

"""The command line of a run whose driver is killed SECONDS after it has written the row of step STEP, and so while
samples of the next step or its training are under way:

    python tests/sglang_cpu/programs/killed_run.py STEP SECONDS train CONFIG ...
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping

from miles_like.loop.recorder import Recorder

if __name__ == "__main__":
    from miles_like.cli import main

    last, seconds = int(sys.argv[1]), float(sys.argv[2])
    write = Recorder.write_end

    def written(self: Recorder, step: int, row: Mapping[str, float]) -> None:
        write(self, step, row)
        if step == last:
            timer = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGKILL])
            timer.daemon = True
            timer.start()

    Recorder.write_end = written  # type: ignore[method-assign]
    del sys.argv[1:3]
    main()

"""The command line of a run whose driver is killed SECONDS after it has published version VERSION, and so while samples
of that version or the step after it are under way:

    python tests/sglang_cpu/programs/killed_run.py VERSION SECONDS train CONFIG ...
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from miles_like.cluster.trainer_ranks import RayTrainer

if __name__ == "__main__":
    from miles_like.cli import main

    last, seconds = int(sys.argv[1]), float(sys.argv[2])
    publish = RayTrainer.publish

    async def published(self: Any, *, version: int) -> Any:
        report = await publish(self, version=version)
        if version == last:
            timer = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGKILL])
            timer.daemon = True
            timer.start()
        return report

    RayTrainer.publish = published  # type: ignore[method-assign]
    del sys.argv[1:3]
    main()

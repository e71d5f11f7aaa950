"""The command line of a run whose teacher's server is killed before the teacher is asked the third time:

python tests/sglang_cpu/programs/killed_teacher.py train CONFIG ...
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import ray

from miles_like.cluster import rollout_servers
from miles_like.experience.teachers import ServerTeacher
from miles_like.run.setup.teachers import RunTeachers

LAST = 2  # requests before


class KilledServer(rollout_servers._Server):
    def kill(self) -> None:
        assert self.startup is not None
        os.killpg(self.startup.handle.pid, signal.SIGKILL)


def plant() -> None:
    vars(rollout_servers).update(_Server=KilledServer)
    launch, share = RunTeachers.launch, ServerTeacher._share
    runs: list[RunTeachers] = []
    asked = 0

    def launched(self: RunTeachers) -> None:
        launch(self)
        runs.append(self)

    async def killing(self: ServerTeacher, client: Any, texts: Sequence[Any]) -> Any:
        nonlocal asked
        asked += 1
        if asked == LAST + 1:
            servers = runs[0]._servers
            assert servers is not None
            ray.get(servers._actors[0].kill.remote())
        return await share(self, client, texts)

    RunTeachers.launch = launched  # type: ignore[method-assign]
    ServerTeacher._share = killing  # type: ignore[method-assign]


if __name__ == "__main__":
    from miles_like.cli import main

    plant()
    main()

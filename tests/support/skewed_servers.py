"""The actors of rollout servers on nodes whose clocks have nothing in common, where a Ray worker can import them."""

from __future__ import annotations

import time
from types import SimpleNamespace

from miles_like.cluster import rollout_servers
from rollout.sglang import servers, startup
from rollout.sglang.servers import ServerLaunch

AHEAD = "CLOCK_AHEAD_S"  # variable of a launch: seconds by which both clocks of its node are ahead


class SkewedServer(rollout_servers._Server):
    """As a run's actor, with every clock of its process `AHEAD` of this machine's."""

    def begin(self, launch: ServerLaunch) -> None:
        ahead = float(launch.env[AHEAD])
        clocks = {
            "time": lambda: time.time() + ahead,
            "monotonic": lambda: time.monotonic() + ahead,
            "sleep": time.sleep,
        }
        for module in (rollout_servers, servers, startup):
            module.time = SimpleNamespace(**clocks)  # type: ignore[attr-defined]
        super().begin(launch)

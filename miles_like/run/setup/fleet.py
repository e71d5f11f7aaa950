"""Makes the fleet of a run: its servers, what publishes to them, and what sends them requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from miles_like.cluster.placement import Slot
from miles_like.fleet.control import ControlFiles
from miles_like.fleet.fleet import Fleet, Progress
from miles_like.fleet.roster import Roster
from miles_like.run.setup.delivery import DirectoryDelivery, TrainerPublication
from miles_like.run.setup.rollout_side import RolloutSide
from rollout.episodes.pool import EnginePool
from rollout.episodes.serving import Serving
from rollout.sglang.client import ServerClient
from rollout.sglang.servers import ServerLaunch
from rollout.wire import endpoints


class RunningServers(Protocol):
    """The servers that a run has started (miles_like.cluster.rollout_servers)."""

    def deaths(self) -> Mapping[int, str]: ...
    def halt(self, number: int) -> None: ...
    def restart(self, number: int) -> None: ...
    def look(self, number: int) -> Progress: ...
    def add(self, slot: Slot, launch: ServerLaunch) -> None:
        """Begins to start another server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUses:
    """What sends requests to servers. clients: of this process, to sample and to evaluate; tell: the rollout workers."""

    pool: EnginePool
    clients: tuple[list[ServerClient], list[ServerClient]]
    tell: Callable[[Collection[str]], None] | None

    def admit(self, rollout: RolloutSide, url: str) -> None:
        sampling, evaluating = self.clients
        sampling.append(client := rollout.client(url))
        evaluating.append(rollout.client(url, routing=False))
        self.pool.add(client)

    async def abort(self, url: str) -> None:
        for client in self.clients[0]:
            if client.url == url:
                await client.abort_all()


@dataclass(frozen=True, slots=True)
class RunProcesses:
    """The `Processes` of a fleet."""

    servers: RunningServers
    rollout: RolloutSide
    version: int  # with which servers start

    def deaths(self) -> Mapping[int, str]:
        return self.servers.deaths()

    def halt(self, number: int) -> None:
        self.servers.halt(number)

    def restart(self, number: int) -> None:
        self.servers.restart(number)

    def look(self, number: int) -> Progress:
        return self.servers.look(number)

    def add(self, number: int) -> None:
        slot = further_slot(self.rollout, number)
        self.servers.add(slot, self.rollout.launch(slot, self.version))


def further_slot(rollout: RolloutSide, number: int) -> Slot:
    """The place of a server beyond those that the run has placed. Raises ValueError where each needs GPUs, of which
    the run has reserved none for more servers."""
    slots = [s for s in rollout.plan.placement.of("rollout") if s.node_rank == 0]
    if any(slot.gpus for slot in slots) or rollout.plan.config.rollout.engine != "embedded":
        raise ValueError(
            f"all {len(slots)} places of the rollout are taken (rollout.servers): remove a server first, or start the "
            "run again with more of them"
        )
    nodes = [slot.node for slot in slots]
    return Slot(role="rollout", index=number, node=nodes[number % len(nodes)], gpus=())


def run_fleet(
    rollout: RolloutSide,
    servers: RunningServers,
    serving: Serving,
    *,
    urls: Sequence[str],
    version: int,
    publication: TrainerPublication | DirectoryDelivery,
    uses: ServerUses,
    say: Callable[[str], None],
) -> Fleet:
    """The fleet of the servers at `urls`, which have started with the weights `version`."""
    c = rollout.plan.config.rollout
    fleet = Fleet(
        roster=Roster(limit=c.restarts, window_s=c.restart_window_s, least=c.min_servers, say=say),
        processes=RunProcesses(servers, rollout, version),
        serving=serving,
        files=ControlFiles(rollout.plan.run_dir),
        connect=publication.connect,
        publish_version=publication.publish,
        admit=partial(uses.admit, rollout),
        tell=uses.tell or _nothing,
        abort=uses.abort,
        needs_trainer=isinstance(publication, TrainerPublication),
        health_every_s=c.health_every_s,
        health_timeout_s=c.health_timeout_s,
        # a stock server may generate a token for /health, which it cannot while it is paused
        paused_health=endpoints.HEALTH if c.engine == "vllm" else endpoints.MODEL_INFO,
    )
    fleet.begin(urls, version)
    return fleet


def _nothing(urls: Collection[str]) -> None: ...

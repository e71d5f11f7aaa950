"""Makes the fleet of a run: its servers, what publishes to them, and what sends them requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from miles_like.alignment.server_checks import RunChecks
from miles_like.cluster.placement import Slot
from miles_like.fleet.control import ControlFiles
from miles_like.fleet.fleet import Fleet, Progress
from miles_like.fleet.roster import Roster
from miles_like.run.setup.delivery import DirectoryDelivery, TrainerPublication
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.types import PublishReport, ServerFault, ServerLost
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
    def living(self) -> Collection[int]: ...
    def add(self, slot: Slot, launch: ServerLaunch) -> None:
        """Begins to start another server."""


@dataclass(frozen=True, slots=True)
class LifeUsers:
    """The `Users` of a fleet."""

    rollout: RolloutSide
    publication: TrainerPublication | DirectoryDelivery
    checks: RunChecks
    pool: EnginePool
    clients: tuple[list[ServerClient], list[ServerClient]]  # of this process, to sample and to evaluate
    workers: Callable[[Collection[str]], None] | None  # as `RolloutWorkers.serve`

    def connect(self, urls: Sequence[str], joins: bool) -> None:
        self.publication.connect(urls, joins)

    async def publish_version(self, version: int) -> PublishReport:
        return await self.publication.publish(version)

    async def join_version(self, urls: Collection[str]) -> Sequence[ServerFault]:
        return await self.checks.join(urls)

    def admit(self, url: str) -> None:
        sampling, evaluating = self.clients
        sampling.append(client := self.rollout.client(url))
        evaluating.append(self.rollout.client(url, routing=False))
        self.pool.add(client)

    def tell(self, urls: Collection[str]) -> None:
        if self.workers is not None:
            self.workers(urls)

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
        slot = further_slot(self.rollout, number, self.servers.living())
        self.servers.add(slot, self.rollout.launch(slot, self.version))


def further_slot(rollout: RolloutSide, number: int, living: Collection[int]) -> Slot:
    """The place of a server beyond those that the run has placed, on a node of `living`. Raises ValueError where each
    needs GPUs, of which the run has reserved none for more servers, and where no such node has had one."""
    slots = [s for s in rollout.plan.placement.of("rollout") if s.node_rank == 0]
    if any(slot.gpus for slot in slots) or rollout.plan.config.rollout.engine != "embedded":
        raise ValueError(
            f"all {len(slots)} places of the rollout are taken (rollout.servers): remove a server first, or start the "
            "run again with more of them"
        )
    if not (nodes := [slot.node for slot in slots if slot.node in living]):
        raise ValueError("every node with a place for it is lost: start the run again with --resume")
    return Slot(role="rollout", index=number, node=nodes[number % len(nodes)], gpus=())


def run_fleet(
    rollout: RolloutSide, servers: RunningServers, urls: Sequence[str], version: int, say: Callable[[str], None]
) -> Fleet | None:
    """The fleet of a run's servers, by their numbers, which have started with the weights `version`. None: all of them
    serve, and the run ends with the first that fails."""
    c = rollout.plan.config
    if not c.rollout.loses_servers or c.takes_turns:
        return None
    r = c.rollout

    def lost(url: str, error: ServerLost) -> None:
        fleet.lost(url, error)

    fleet = Fleet(
        roster=Roster(limit=r.restarts, window_s=r.restart_window_s, least=r.min_servers, say=say),
        processes=RunProcesses(servers, rollout, version),
        serving=Serving(urls, lost, limit_s=c.cluster.timeout_s),
        files=ControlFiles(rollout.plan.run_dir),
        needs_trainer=not c.publish.during_training,
        health_every_s=r.health_every_s,
        health_timeout_s=r.health_timeout_s,
        # a stock server may generate a token for /health, which it cannot while it is paused
        paused_health=endpoints.HEALTH if r.engine == "vllm" else endpoints.MODEL_INFO,
    )
    fleet.begin(urls, version)
    return fleet

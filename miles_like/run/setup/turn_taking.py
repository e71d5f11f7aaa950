"""The turns of a run: released servers before the trainer is built, and the objects of the two sides afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miles_like.config.run import RunConfig
from miles_like.protocols import TrainerRanks
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.turns.order import ALL, SleepingRanks, Turns
from miles_like.turns.users import InFlight, Sampling, TurnServers, TurnTrainer
from rollout.episodes.partial import PartialRollouts
from rollout.episodes.pool import EnginePool
from rollout.sglang.client import SGLangClient
from rollout.wire.bodies import MemoryTag


async def release_servers(rollout: RolloutSide, urls: Sequence[str]) -> None:
    """Releases the memory that servers hold, for the trainer to be built in: all where they were just started, and what
    is not released yet where the trainer is built again. Raises RuntimeError."""
    clients = [rollout.sglang_client(url) for url in urls]
    held: dict[tuple[MemoryTag, ...], list[SGLangClient]] = {}
    for client in clients:
        held.setdefault(tuple(tag for tag in ALL if tag not in client.occupation.released), []).append(client)
    try:
        for tags, alike in held.items():
            if tags:
                await TurnServers(clients=alike).release(tags)
    finally:
        for client in clients:
            await client.close()


def released(config: RunConfig) -> str:
    """The sentence for the log once the servers have released their memory."""
    done, n = "rollout servers have released their memory; the trainer starts", config.rollout.restarts
    if not config.rollout.loses_servers:
        return done
    return (
        f"{done}; rollout.restarts = {n} has no effect while servers and trainer take turns: a run that loses "
        "a server ends and can be continued with --resume"
    )


class TurnTaking:
    """The turns of a run whose servers are released and whose ranks are built, so that it is the trainer's turn.

    models: the raw ranks of every trained model by their name, of which "trainer" is published.
    """

    def __init__(
        self,
        rollout: RolloutSide,
        urls: Sequence[str],
        models: Mapping[str, SleepingRanks],
        partial: InFlight | None = None,
    ) -> None:
        """partial: the background sampling; None: nothing is sampled in the background."""
        self._servers = TurnServers(clients=[rollout.sglang_client(url) for url in urls])
        if partial is None:
            partial = PartialRollouts(EnginePool(self._servers.clients))
        self.sampling = Sampling(partial=partial)
        self.turns = Turns(
            servers=self._servers,
            models=list(models.values()),
            publisher=models["trainer"],
            background=self.sampling,
        )
        self.models: dict[str, TrainerRanks] = {
            name: TurnTrainer(ranks=ranks, turns=self.turns, trains_policy=name == "trainer")
            for name, ranks in models.items()
        }

    async def start(self) -> None:
        """Call it first: nothing is sampled before the servers' turn."""
        await self.sampling.close()

    async def close(self) -> None:
        for client in self._servers.clients:
            await client.close()

"""The Ray cluster of one run: joined, its nodes chosen and their GPUs reserved, once.

Ray is imported by the first call that needs it, because a dry run and finished stages need none.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from miles_like.config.run import RunConfig
from miles_like.report.console import note

if TYPE_CHECKING:
    from miles_like.cluster.run_nodes import RunNodes
    from miles_like.nodes.members import Node
    from miles_like.nodes.reservation import Reservation


def on_every_node(directory: Path, ray_address: str | None) -> Path:
    """A directory that was given to this command, as the nodes of a cluster that it joins find it: their processes have
    other working directories. It stays relative where all processes are this machine's."""
    return directory if ray_address is None else directory.resolve()


class RunCluster:
    """Joins the cluster and chooses the run's nodes, both once: with their GPUs reserved for ranks and servers
    (`nodes`), or for work that needs no GPU (`hosts`).

    ray_address: as `start_ray`.
    """

    def __init__(self, config: RunConfig, run_dir: Path, console: Console, ray_address: str | None) -> None:
        self.config, self.run_dir, self.console, self.ray_address = config, run_dir, console, ray_address
        self._reservation: Reservation | None = None
        self._hosts: tuple[Node, ...] = ()

    def join(self) -> None:
        """Raises as `start_ray`."""
        from miles_like.nodes.session import start_ray

        start_ray(self.ray_address)

    def nodes(self) -> RunNodes:
        """The nodes of the run's ranks and servers. The first call reserves their GPUs, which the run keeps until
        `release`. Raises as `start_ray` and `reserve`."""
        from miles_like.cluster.run_nodes import RunNodes
        from miles_like.nodes.reservation import reserve
        from miles_like.nodes.session import is_local

        self.join()
        if self._reservation is None:
            c, run = self.config.cluster, str(self.run_dir.resolve())
            self._reservation = reserve(
                c.nodes,
                c.gpus_per_node,
                run=run,
                when_busy=c.when_busy,
                timeout_s=c.timeout_s,
                say=partial(note, self.console),
            )
        return RunNodes(
            nodes=self._reservation.nodes,
            facts=self._reservation.facts,
            cluster=self.config.cluster,
            server_env=self.config.rollout.env,
            local=is_local(),
        )

    def hosts(self) -> tuple[Node, ...]:
        """The nodes for work that needs no GPU, such as staging and conversion: those of `nodes` once it has been
        called, otherwise as many nodes of that size, whatever runs on their GPUs. A run that starts ranks too calls
        `nodes` first, because idle nodes may be other ones. Raises as `start_ray` and `suitable_nodes`."""
        from miles_like.nodes.members import choose_nodes, suitable_nodes

        if self._reservation is not None:
            return self._reservation.nodes
        self.join()
        if not self._hosts:
            c = self.config.cluster
            found = suitable_nodes(c.nodes, c.gpus_per_node, timeout_s=c.timeout_s, say=partial(note, self.console))
            self._hosts = choose_nodes(found, c.nodes)
        return self._hosts

    def replace_lost(self, weights: Path) -> tuple[frozenset[int], frozenset[int]]:
        """(numbers of the run's nodes that are lost, of those that were and in whose place another node is now).

        A node takes the place of a lost one if it has as many GPUs free and sees `weights`, the directory that ranks
        load. Raises RuntimeError as `reserve`.
        """
        from miles_like.nodes.members import living_nodes
        from miles_like.nodes.reservation import spare_node

        held = self._reservation
        if held is None:
            return frozenset(), frozenset()
        alive = {node.id for node in living_nodes()}
        lost, replaced = set[int](), set[int]()
        for number, node in enumerate(held.nodes):
            if node.id in alive:
                continue
            run, gpus = str(self.run_dir.resolve()), self.config.cluster.gpus_per_node
            spare = spare_node(held.nodes, gpus, run=run, sees=weights, timeout_s=self.config.cluster.timeout_s)
            if spare is None:
                lost.add(number)
            else:
                replaced.add(number)
                self._reservation = held = held.with_spare(number, spare)
        return frozenset(lost), frozenset(replaced)

    def release(self) -> None:
        """Give the GPUs back; the next call of `nodes` or `hosts` chooses again."""
        self._hosts = ()
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

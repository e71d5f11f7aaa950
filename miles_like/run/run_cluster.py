"""The Ray cluster of one run: joined, its nodes chosen and their GPUs reserved, once.

Ray is imported by the first call that needs it, because a dry run and finished stages need none.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from miles_like.config.run import RunConfig

if TYPE_CHECKING:
    from miles_like.cluster.run_nodes import RunNodes
    from miles_like.nodes.reservation import Reservation


def on_every_node(directory: Path, ray_address: str | None) -> Path:
    """A directory that was given to this command, as the nodes of a cluster that it joins find it: their processes have
    other working directories. It stays relative where all processes are this machine's."""
    return directory if ray_address is None else directory.resolve()


class RunCluster:
    """The first call of `nodes` joins the cluster, chooses the nodes and reserves their GPUs; all further calls return
    the same nodes.

    ray_address: as `start_ray`. reserves: set to False, before the first call, for work that needs the nodes and not
    their GPUs.
    """

    def __init__(self, config: RunConfig, run_dir: Path, console: Console, ray_address: str | None) -> None:
        self.config, self.run_dir, self.console, self.ray_address = config, run_dir, console, ray_address
        self.reserves = True
        self._reservation: Reservation | None = None

    def join(self) -> None:
        """Raises as `start_ray`."""
        from miles_like.nodes.session import start_ray

        start_ray(self.ray_address)

    def nodes(self) -> RunNodes:
        """Raises as `start_ray` and `reserve`."""
        from miles_like.cluster.run_nodes import RunNodes
        from miles_like.nodes.session import is_local

        self.join()
        if self._reservation is None:
            self._reservation = self._chosen()
        return RunNodes(
            nodes=self._reservation.nodes,
            facts=self._reservation.facts,
            cluster=self.config.cluster,
            server_env=self.config.rollout.env,
            local=is_local(),
        )

    def release(self) -> None:
        """Give the GPUs back; the next call of `nodes` chooses again."""
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def _chosen(self) -> Reservation:
        from miles_like.nodes.members import suitable_nodes
        from miles_like.nodes.reservation import Reservation, reserve

        c = self.config.cluster
        if c.gpus_per_node and not self.reserves:
            found = suitable_nodes(c.nodes, c.gpus_per_node, timeout_s=c.timeout_s, say=self._say)
            return Reservation(nodes=found[: c.nodes], facts=())
        run = str(self.run_dir.resolve())
        return reserve(c.nodes, c.gpus_per_node, run=run, when_busy=c.when_busy, timeout_s=c.timeout_s, say=self._say)

    def _say(self, line: str) -> None:
        self.console.print(f"{'':12}{line}", markup=False, soft_wrap=True)

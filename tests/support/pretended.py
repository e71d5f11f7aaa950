"""A Ray cluster on this machine whose nodes have their own addresses in 127.0.0.0/8 and GPUs that Ray only counts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import ray
from ray.cluster_utils import Cluster

from miles_like.cluster.actors import Process
from miles_like.nodes.session import start_ray, stop_ray

# a token would have to reach every process of Ray; metrics and prestarted workers cost seconds a node
QUIET = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
}
SMALL: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False, "num_cpus": 1}


class PretendedCluster:
    """A head without GPUs, and the nodes that `add` starts. environment: more variables of the nodes' Ray processes,
    which their workers inherit."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {**QUIET, **environment}
        with patch.dict(os.environ, QUIET):
            self._cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "num_gpus": 0})
        self.address = str(self._cluster.address)

    def add(self, hosts: Sequence[int], *, gpus: int = 8) -> list[Any]:
        """Start node 127.0.0.`host` for every host, one after the other: on two cores Ray gives up on the processes of
        a node when several start at once. Returns their handles, which `remove` takes."""
        with patch.dict(os.environ, self._environment):
            return [self._start(f"127.0.0.{host}", gpus) for host in hosts]

    def _start(self, address: str, gpus: int, tries: int = 3) -> Any:
        """Ray waits 15 s for a process that reports ports, which a busy machine may exceed; the node then has ended."""
        try:
            return self._cluster.add_node(num_gpus=gpus, node_ip_address=address, **SMALL)
        except Exception as e:  # Ray raises no narrower one
            if tries == 1 or "timed out during startup" not in str(e):
                raise
            return self._start(address, gpus, tries - 1)

    def remove(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def stop(self) -> None:
        stop_ray()
        self._cluster.shutdown()  # type: ignore[no-untyped-call]


@contextmanager
def pretended_cluster(hosts: Sequence[int], environment: Mapping[str, str] | None = None) -> Iterator[PretendedCluster]:
    """A cluster with the nodes 127.0.0.`host`, which this process has joined."""
    with patch.dict(os.environ, QUIET):
        cluster = PretendedCluster(environment or {})
        try:
            cluster.add(hosts)
            start_ray(cluster.address)
            yield cluster
        finally:
            cluster.stop()


class Probe(Process):
    """An actor as a rank or a server is one, without their libraries: it reports what it was started with."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def see(self) -> dict[str, str]:
        return dict(os.environ)

    def see_after(self, environments: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """What actors that are started on this node with these variables would see."""
        found = []
        for environment in environments:
            with patch.dict(os.environ):
                self.set_environment(environment)
                found.append(self.see())
        return found

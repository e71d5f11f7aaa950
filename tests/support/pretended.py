"""A Ray cluster on this machine whose nodes have their own addresses in 127.0.0.0/8 and GPUs that Ray only counts.

Every node has an nvidia-smi (tests/support/nvidia_smi.py) that lists twice as many GPUs as Ray has there, which are the
second half. The numbers or UUIDs that Ray was started with are in another order than the list.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
from ray._private import ray_constants, services
from ray._private.node import Node as RayNode
from ray._raylet import (  # type: ignore[attr-defined]
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)
from ray.cluster_utils import Cluster

from miles_like.cluster.actors import Process
from miles_like.nodes.session import start_ray, stop_ray

# a token would have to reach every process of Ray; metrics and prestarted workers cost seconds a node; workers of 32
# nodes that start at once on two cores take longer than the minute that Ray gives each
QUIET = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_worker_register_timeout_seconds": "600",
}
SMALL: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False, "num_cpus": 1}


def uuid_of(host: int, index: int) -> str:
    """Of the GPU that nvidia-smi of node 127.0.0.`host` numbers `index`."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'{host}/{index}')}"


class PretendedCluster:
    """A head without GPUs, and the nodes that `add` starts. environment: more variables of the nodes' Ray processes,
    which their workers inherit.

    A node is one process. Its dashboard agent, which does nothing without the packages of ray[default], is left out,
    and the agent that makes the environments of its workers is the head's: with both, a node takes three seconds of
    processor time more, and 180 MB.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {**QUIET, **environment}
        self._machines = tempfile.TemporaryDirectory(prefix="pretended-")
        self._agent_port = 0  # of the head's agent
        self._no_agent = _program(
            Path(self._machines.name, "no_agent"), "/bin/sh", "exec tail --pid=$PPID -f /dev/null"
        )
        head = {**SMALL, "num_gpus": 0, "no_monitor": True, "include_log_monitor": False}
        self._cluster = self._patient(lambda: Cluster(initialize_head=True, head_node_args=head), QUIET)
        self._agent_port = self._cluster.head_node._ray_params.runtime_env_agent_port
        self.address = str(self._cluster.address)

    def add(self, hosts: Sequence[int], *, gpus: int = 8, racks: Mapping[int, str] | None = None) -> list[Any]:
        """Start node 127.0.0.`host` for every host, one after the other. racks: by host, of those that have one.
        Returns their handles, which `remove` takes."""
        return [self._start(host, gpus, (racks or {}).get(host)) for host in hosts]

    def _start(self, host: int, gpus: int, rack: str | None) -> Any:
        labels = {} if rack is None else {"rack": rack}
        named = {"num_gpus": gpus, "node_ip_address": f"127.0.0.{host}", "labels": labels, **SMALL}
        return self._patient(
            lambda: self._cluster.add_node(**named), {**self._environment, **self._machine(host, gpus)}
        )

    def _patient(self, start: Callable[[], Any], environment: Mapping[str, str], tries: int = 3) -> Any:
        """Call `start` with these variables. Ray waits 30 s for a node, which a busy machine may exceed; the node then
        has ended."""
        try:
            with (
                patch.dict(os.environ, environment),
                patch.object(services, "start_ray_process", self._start_process),
                patch.object(RayNode, "start_api_server"),
            ):
                return start()
        except Exception as e:  # Ray raises no narrower one
            if tries == 1 or "timed out during startup" not in str(e):
                raise
            return self._patient(start, environment, tries - 1)

    def _start_process(self, command: list[str], process_type: str, *arguments: Any, **options: Any) -> Any:
        """In place of Ray's function: agents that are left out are processes that wait for the end of the
        node, which ends with its agents, and their ports are written where it looks for them."""
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            given = dict(word.removeprefix("--").split("=", 1) for word in command if "=" in word)
            ports = dict.fromkeys(_UNUSED, -1)
            agent = given["runtime_env_agent_command"].replace(
                f"--node-ip-address={given['node_ip_address']}", "--node-ip-address=0.0.0.0"
            )
            if self._agent_port:
                agent, ports[RUNTIME_ENV_AGENT_PORT_NAME] = str(self._no_agent), self._agent_port
            for name, port in ports.items():
                persist_port(given["session_dir"], given["node_id"], name, port)
            command = [word for word in command if "agent_command=" not in word]
            command += [f"--dashboard_agent_command={self._no_agent}", f"--runtime_env_agent_command={agent}"]
        return _START(command, process_type, *arguments, **options)

    def _machine(self, host: int, gpus: int) -> dict[str, str]:
        """Make the node's nvidia-smi; returns the variables of its Ray, which has the GPUs from number `gpus` on: of
        nodes with an even number named by UUIDs, of the others by numbers."""
        where = Path(self._machines.name, str(host))
        where.mkdir(exist_ok=True)
        has = [
            {"index": str(i), "uuid": uuid_of(host, i), "name": "NVIDIA H100 80GB HBM3", **_HEALTHY}
            for i in range(2 * gpus)
        ]
        (where / "gpus.json").write_text(json.dumps(has))
        _program(where / "nvidia-smi", f"{sys.executable} -IS", Path(__file__).with_name("nvidia_smi.py").read_text())
        visible = [gpu["index" if host % 2 else "uuid"] for gpu in reversed(has[gpus:])]
        return {"PATH": f"{where}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ",".join(visible)}

    def remove(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def stop(self) -> None:
        stop_ray()
        self._cluster.shutdown()
        self._machines.cleanup()


def _program(path: Path, interpreter: str, text: str) -> Path:
    path.write_text(f"#!{interpreter}\n{text}")
    path.chmod(0o755)
    return path


_HEALTHY = {
    "memory.total": "81559",
    "memory.free": "81079",
    "driver_version": "580.95.05",
    "persistence_mode": "Enabled",
    "mig.mode.current": "Disabled",
    "ecc.mode.current": "Enabled",
    "ecc.errors.uncorrected.volatile.total": "0",
    "compute_mode": "Default",
}


_UNUSED = (METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME, DASHBOARD_AGENT_LISTEN_PORT_NAME)
_START = services.start_ray_process


@contextmanager
def pretended_cluster(
    hosts: Sequence[int],
    environment: Mapping[str, str] | None = None,
    *,
    gpus: int = 8,
    racks: Mapping[int, str] | None = None,
) -> Iterator[PretendedCluster]:
    """A cluster with the nodes 127.0.0.`host`, which this process has joined. racks: as `PretendedCluster.add`."""
    with patch.dict(os.environ, QUIET):
        cluster = PretendedCluster(environment or {})
        try:
            cluster.add(hosts, gpus=gpus, racks=racks)
            start_ray(cluster.address)
            yield cluster
        finally:
            cluster.stop()


_RAYS = ("RAY_", "PYTHONBREAKPOINT", "SPT_NOENV")  # names that Ray gives to every worker


@dataclass(frozen=True, slots=True)
class Seen:
    """What a process reports of itself."""

    address: str  # of its node
    set_here: Mapping[
        str, str
    ]  # variables that the node's Ray has not, or with other values, without Ray's and empty ones
    devices: tuple[str, ...]  # UUIDs of the GPUs that CUDA would show it, in that order
    modules: frozenset[str]  # names of packages that it has imported


class Probe(Process):
    """An actor as a rank or a server is one, without their libraries: it reports what it was started with."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        super().__init__(log, environment)
        self._given = set(environment)

    def see(self) -> Seen:
        return look(dict(os.environ))

    def see_after(self, environments: Sequence[Mapping[str, str]]) -> list[Seen]:
        """What actors that are started on this node with these variables would see: those of the node's Ray, which
        this process has too, with theirs in place of those that it was given."""
        of_ray = _of_ray()
        inherited = {name: value for name, value in os.environ.items() if name not in self._given}
        inherited |= {name: of_ray[name] for name in self._given if name in of_ray}
        found = []
        for environment in environments:
            with patch.dict(os.environ, inherited, clear=True):
                self.set_environment(environment)
                found.append(self.see())
        return found


def look(environment: Mapping[str, str]) -> Seen:
    """What a process with these variables, on the node of this one, is and has."""
    of_ray = _of_ray()
    return Seen(
        address=str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
        set_here={n: v for n, v in environment.items() if v and v != of_ray.get(n) and not n.startswith(_RAYS)},
        devices=_devices(environment),
        modules=frozenset(name.partition(".")[0] for name in sys.modules),
    )


def _of_ray() -> Mapping[str, str]:
    """The environment of the node's Ray, which is the parent of its workers."""
    entries = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def _devices(environment: Mapping[str, str]) -> tuple[str, ...]:
    """UUIDs of the GPUs that CUDA shows a process with these variables, as its programming guide has it: names in
    CUDA_VISIBLE_DEVICES are numbers or UUIDs; the numbers are nvidia-smi's in the order of PCI buses alone."""
    of = _listed(environment["PATH"])
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return tuple(of.values())
    names = [name for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name]
    if any(name.isdecimal() for name in names) and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise RuntimeError("CUDA_VISIBLE_DEVICES has numbers, which are nvidia-smi's with CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return tuple(of[name] if name.isdecimal() else name for name in names)


@functools.cache
def _listed(path: str) -> Mapping[str, str]:
    """Number -> UUID, as the first nvidia-smi on the path lists them."""
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    done = subprocess.run(query, env={"PATH": path}, stdout=subprocess.PIPE, text=True, check=True)
    return dict(line.split(", ") for line in done.stdout.splitlines())

"""What the nodes of tests/cluster/test_spread_run.py run: the product's command, whose ranks and servers write what
they find on their node; processes of a run on GPUs that Ray only counts; a teacher's server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import ray
import torch.distributed
from rich.console import Console

from miles_like.cluster import rollout_servers, trainer_ranks
from miles_like.cluster.actors import Process
from miles_like.cluster.placement import Slot, plan_placement
from miles_like.config.load import load_config
from miles_like.run.setup.run_cluster import RunCluster
from miles_like.run.setup.teachers import RunTeachers
from rollout.server_key import ServerKey
from rollout.sglang.client import SGLangClient
from rollout.sglang.servers import ServerLaunch

CONFIGS = Path(__file__).parents[2] / "configs"
UNIT_BYTES = "UNIT_BYTES"  # variable of the command: of the files that a conversion writes
DISK = "NODE_DISK"  # environment variable of a run's processes: the directory that is a separate disk on each node


def found(environment: dict[str, str]) -> dict[str, Any]:
    """Of this process, or of one beside it with this environment."""
    return {
        "host": socket.gethostname(),
        "address": str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
        "disk": Path(environment[DISK], "owner").read_text(),
        "environment": environment,
    }


class SeenRank(trainer_ranks._Rank):
    """A trainer rank that writes LOG.json when its world is built."""

    def __init__(self, log: Path, environment: dict[str, str]) -> None:
        super().__init__(log, environment)
        self._seen = log.with_suffix(".json")

    def start(self, *arguments: Any) -> Any:
        place = super().start(*arguments)
        world = {"world": torch.distributed.get_world_size(), "backend": torch.distributed.get_backend()}
        self._seen.write_text(json.dumps(found(dict(os.environ)) | world))
        return place


class SeenServer(rollout_servers._Server):
    """The actor of a server: writes LOG.json with the environment of the server's own process."""

    def __init__(self, log: Path, environment: dict[str, str]) -> None:
        super().__init__(log, environment)
        self._seen = log.with_suffix(".json")

    def begin(self, launch: ServerLaunch) -> None:
        super().begin(launch)
        assert self.startup is not None
        lines = Path(f"/proc/{self.startup.handle.pid}/environ").read_text().split("\0")
        environment = dict(line.split("=", 1) for line in lines if "=" in line)
        self._seen.write_text(json.dumps(found(environment) | {"url_host": launch.host}))


def command() -> None:
    """`miles-like train` with the words of the command line after it, with ranks and servers that are seen."""
    from megatron_bridge.convert import to_megatron
    from miles_like.cli import app

    vars(trainer_ranks).update(_Rank=SeenRank)
    vars(rollout_servers).update(_Server=SeenServer)
    if size := os.environ.get(UNIT_BYTES):
        defaults = to_megatron.convert_source.__kwdefaults__
        assert defaults is not None
        defaults["unit_bytes"] = int(size)
    app(sys.argv[1:])


class Surroundings(Process):
    """An actor as a rank or a server is one: it reports where it is and what it was started with."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def see(self) -> dict[str, str]:
        return dict(os.environ)


def placed_on_gpus(address: str, disk: str, logs: Path) -> dict[str, Any]:
    """On the driver's node: where the smallest shipped cluster's run is placed, asked twice, and what the first rank
    and server of each node find there."""
    settings = [f"cluster.stage_dir={disk}", f"cluster.env={{{DISK}='{disk}'}}", f"rollout.env={{{DISK}='{disk}'}}"]
    config = load_config(CONFIGS / "qwen3_30b_a3b.toml", settings)
    plan = plan_placement(config.cluster, config.parallel, config.servers)
    cluster = RunCluster(config, logs, Console(quiet=True), address)
    nodes, again = cluster.nodes(), cluster.nodes()
    first: dict[tuple[str, int], Slot] = {}
    for slot in plan.slots:
        first.setdefault((slot.role, slot.node), slot)
    actors = {
        f"{role} {node}": nodes.start(Surroundings, slot, logs / f"{role}{node}.log")
        for (role, node), slot in first.items()
    }
    seen = {name: ray.get(actor.see.remote(), timeout=120) for name, actor in actors.items()}
    there = {name: ray.get(actor.node.remote(), timeout=120) for name, actor in actors.items()}
    by_id = {n.id: n.address for n in nodes.nodes}
    cluster.release()
    return {
        "nodes": [n.address for n in nodes.nodes],
        "again": [n.address for n in again.nodes],
        "hosts": [f.host for f in nodes.facts],
        "seen": {name: {"address": by_id[there[name]], "environment": seen[name]} for name in seen},
    }


def teach(address: str, source: Path, disk: Path, run_dir: Path) -> dict[str, Any]:
    """On the driver's node: starts a teacher's server on another, which does not see the teacher's directory."""
    settings = [
        "cluster.nodes=2",
        "cluster.pools.teachers.nodes=1",
        f"cluster.stage_dir={disk}/local",
        f"cache_dir={disk}/cache",
        "distillation.mode=alone",
        f"distillation.teachers.other={{kind='server',path='{source}'}}",
    ]
    config = load_config(CONFIGS / "tiny.toml", settings)
    cluster = RunCluster(config, run_dir, Console(quiet=True), address)
    tokenizer: Any = None
    key = ServerKey.new()
    teachers = RunTeachers(
        config, run_dir, student={}, tokenizer=tokenizer, console=cluster.console, key=key, nodes=cluster.nodes
    )
    try:
        teachers.prepare()
        teachers.launch()
        teachers.wait(lambda text: None)
        (url,) = teachers._urls.values()
        path = asyncio.run(served_path(url, key))
    finally:
        teachers.stop()
    return {"url": url, "model_path": path}


async def served_path(url: str, key: ServerKey) -> str:
    client = SGLangClient(url, routing=None, request_timeout_s=30.0, key=key)
    try:
        return (await client.model_info()).model_path
    finally:
        await client.close()

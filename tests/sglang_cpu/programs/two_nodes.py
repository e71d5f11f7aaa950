"""On the first of two nodes: a stock SGLang server whose parts are one on each, started as a run starts it.

python -m tests.sglang_cpu.programs.two_nodes RAY_ADDRESS MODEL LOGS FOUND    writes `Found` to the file FOUND as JSON
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TypedDict

import ray
from rich.console import Console

from miles_like.cluster import rollout_servers
from miles_like.cluster.placement import plan_placement
from miles_like.config.load import load_config
from miles_like.run.setup.rollout_side import server_launch
from miles_like.run.setup.run_cluster import RunCluster
from miles_like.types import Prompt, SamplingParams
from rollout.sglang.client import SGLangClient
from tests.sglang_cpu.served import INTERPRETER, ROOT

SETTINGS = (
    *("cluster.nodes=2", "cluster.gpus_per_node=1", "parallel.dp=2", "parallel.ep=1"),
    *("precision.format=bf16", "precision.qat=false", "model.make=false", "model.path=owner/name"),
    *("rollout.engine=sglang", "rollout.sglang.tp_size=2", "rollout.start_timeout_s=600"),
    f"rollout.sglang.python={INTERPRETER}",
    "rollout.env={SGLANG_CPU_OMP_THREADS_BIND='0|1'}",  # SGLang refuses more ranks than NUMA nodes without it
)
FAILS_S = 60.0


class Found(TypedDict):
    phases: list[str]
    url: str
    answer: list[int]
    failure: str | None  # after the second part was killed


class KilledServer(rollout_servers._Server):
    def kill(self) -> None:
        assert self.startup is not None
        os.killpg(self.startup.handle.pid, signal.SIGKILL)


def serve(address: str, model: Path, logs: Path) -> Found:
    """Starts the server, asks it once, and kills its second part."""
    vars(rollout_servers).update(_Server=KilledServer)
    config = load_config(ROOT / "configs" / "tiny_qwen.toml", list(SETTINGS))
    slots = plan_placement(config.cluster, config.parallel, config.servers).of("rollout")
    cluster = RunCluster(config, logs, Console(quiet=True), address)
    launches = [(slot, server_launch(config, model, logs, slot, routes=True)) for slot in slots]
    servers = rollout_servers.RayServers(launches, cluster.nodes(), logs)
    phases: list[str] = []
    try:
        (url,) = servers.wait(phases.append)
        answer = asyncio.run(asked(url))
        ray.get(servers._actors[1].kill.remote())  # type: ignore[attr-defined]
        killed = time.monotonic()
        while (failure := servers.failure()) is None and time.monotonic() < killed + FAILS_S:
            time.sleep(0.1)
        return {"phases": phases, "url": url, "answer": answer, "failure": failure}
    finally:
        servers.stop()
        cluster.release()


async def asked(url: str) -> list[int]:
    client = SGLangClient(url, routing=None, request_timeout_s=120, samples_from="client")
    try:
        prompt, params = Prompt(id="a", token_ids=(5, 6, 7), answer=""), SamplingParams(max_new_tokens=6)
        (group,) = await client.generate([prompt], n=1, params=params)
        return [int(i) for i in group.samples[0].token_ids[3:]]
    finally:
        await client.close()


if __name__ == "__main__":
    address, model, logs, out = sys.argv[1:]
    Path(out).write_text(json.dumps(serve(address, Path(model), Path(logs))))

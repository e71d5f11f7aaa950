"""A publication to a vLLM server as a run makes it: the trainer scores the known text before, and the server after."""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from miles_like.alignment.known_answer import KnownAnswer
from miles_like.alignment.server_checks import RunChecks
from miles_like.types import PublishReport
from rollout.config import PublishConfig
from rollout.publish.directory.disk_publisher import DiskPublisher, SharedDirectory
from rollout.publish.publication import PublishTarget
from rollout.vllm.client import VLLMClient
from tests.vllm_cpu.conftest import Served
from tests.vllm_cpu.served import Reference, shape, stream

TEXT = torch.randint(2, 128, (256,), generator=torch.Generator().manual_seed(9))
KL = 1e-3  # what kernels explain


@dataclass(frozen=True)
class Trainer:
    """As LiveTrainer, with transformers' log-probabilities of the weights that are published."""

    model: Reference
    shape: None = None

    async def score(self, tokens: Any, *, temperature: float, routes: Any) -> Any:
        return SimpleNamespace(logprobs=tuple(self.model.logprobs(ids, temperature) for ids in tokens.ids))


def publisher(served: Served, home: Path, pause_mode: str = "retract") -> DiskPublisher:
    config = PublishConfig.model_validate({"path": "disk", "pause_mode": pause_mode})
    target = PublishTarget(urls=(served.url,), kind="vllm", spec=None, config=config, timeout_s=300)
    shared = SharedDirectory(path=home, hf_config=shape(served.kind), copy_from=served.home / "first")
    return DiskPublisher(target, shared)


def publish_checked(
    served: Served, home: Path, tensors: dict[str, Tensor], model: Reference, version: int
) -> tuple[float, str]:
    """(the gap in nats, what the run printed). Raises as RunChecks.published."""
    console, pub = Console(file=io.StringIO(), width=500), publisher(served, home)

    async def publish(number: int) -> PublishReport:
        return await asyncio.to_thread(pub.publish, stream(tensors), version=number)

    async def run() -> float:
        client = VLLMClient(served.url, routing=None, request_timeout_s=300)
        stand_ins: Any = {"trainer": Trainer(model), "comparison": None}
        checks = RunChecks(
            clients=[client],
            known=KnownAnswer(trainer=stand_ins["trainer"], text=TEXT, kl_max=KL),
            republish=publish,
            comparison=stand_ins["comparison"],
            prompts=(),
            check_prompts=0,
            check_every=0,
            checksums_every=0,
            seed=0,
            idle=True,
            console=console,
        )
        try:
            await checks.before_publication()
            return (await checks.published(version, await publish(version)))[1]["mismatch/known_answer"]
        finally:
            await client.close()

    gap = asyncio.run(run())
    return gap, str(console.file.getvalue())  # type: ignore[attr-defined]

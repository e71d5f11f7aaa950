"""Trainer and embedded engine take turns on one CUDA device, in one process: what the engine says of its tokens is what
the trainer says of them, after each of two steps whose weights are published from device to device.

Prints the mismatch of both. Not covered: servers and Ray (test_demo_cuda.py).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_like.types import MicroBatch, NamedTensor
from rollout.embedded.engine.engine import EngineLimits
from rollout.embedded.engine.requests import Completed
from rollout.embedded.server.service import Service
from rollout.wire.bodies import MemoryTag
from rollout.wire.checksum import tensor_checksum
from routing_replay.trace import RoutingTrace
from tests.support import toy
from tests.support.embedded_fixtures import run, spec
from tests.support.spawn import run_ranks
from tests.support.tiny_models import felt_tensors, tiny, write_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
KL = 5e-3  # nats a token: both sides round to BF16
TAGS = [MemoryTag.KV_CACHE, MemoryTag.WEIGHTS]


def batch(done: Completed, prompt: Sequence[int], name: str) -> MicroBatch:
    """One answer as a sample of the trainer, with the engine's routes and log-probs."""
    reply = done.reply
    tokens = torch.tensor([*prompt, *reply.output_ids.tolist()])
    raw = np.frombuffer(base64.b64decode(reply.routed_experts or ""), np.int32).copy()
    routes = torch.from_numpy(raw).view(len(tokens) - 1, -1, toy.TOP_K)[:, list(toy.LAYERS)].to(torch.uint8)
    loss = torch.arange(len(tokens) - 1) >= len(prompt) - 1
    logprobs = torch.zeros(len(tokens) - 1)
    logprobs[loss] = torch.from_numpy(np.array(reply.logprobs))
    trace = RoutingTrace(experts=routes, layers=toy.LAYERS, num_experts=toy.EXPERTS).with_checksums(tokens[:-1])
    return MicroBatch(
        samples=(name,),
        tokens=tokens[:-1],
        labels=tokens[1:],
        positions=torch.arange(len(tokens) - 1),
        cu_seqlens=torch.tensor([0, len(tokens) - 1], dtype=torch.int32),
        loss_mask=loss,
        advantages=torch.where(loss, 1.0 if len(name) % 2 else -1.0, 0.0),
        rollout_logprobs=logprobs,
        routing=trace,
    )


def publish(t: Any, served: Service, version: int) -> None:
    served.begin_update(str(version))
    sent = {}
    for name, tensor in t.export():
        sent[name] = tensor_checksum(name, tensor)
        served.update([NamedTensor(name, tensor.clone())], flush_cache=True, version=str(version))
    served.end_update(str(version))
    assert served.checksums() == sent


def kl(rows: Sequence[MicroBatch], scored: Sequence[torch.Tensor]) -> float:
    gap = torch.cat([(s.cpu() - b.rollout_logprobs)[b.loss_mask] for s, b in zip(scored, rows, strict=True)])
    return float((gap.exp() - 1 - gap).mean())


def turns(rank: int, world: int, port: int, hf: str, device: Any) -> list[dict[str, float]]:
    """The mismatch of each of two steps."""
    limits = EngineLimits(max_total_tokens=16384, context_length=256)
    served = Service(Path(hf), limits, dtype=torch.bfloat16, device=device)
    served.release(TAGS)
    out = []
    config = toy.config(hf, dtype="bfloat16", kernels={"spec": "local"}, lr=3e-4)
    with toy.trainer(config, rank, world, port) as t:
        for step in (1, 2):
            t.sleep()
            served.resume(TAGS)
            with t.parameters():
                publish(t, served, step)
            prompts = [
                torch.randint(2, 128, (12,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(8)
            ]
            groups = run(served.engine, *(spec(p, n=4, sampling_seed=step, max_new_tokens=24) for p in prompts))
            served.release(TAGS)
            t.wake()
            rows = [
                batch(done, p, f"{step}/{i}/{j}")
                for i, (p, group) in enumerate(zip(prompts, groups, strict=True))
                for j, done in enumerate(group)
            ]
            replayed, own = t.score(rows, replay=True).logprobs, t.score(rows).logprobs
            metrics = t.step(rows, sum(int(b.loss_mask.sum()) for b in rows), step).metrics
            out.append(
                {"kl": kl(rows, replayed), "kl without replay": kl(rows, own)}
                | {k: float(v) for k, v in metrics.items() if k in ("train/loss", "routing/replay_coverage")}
            )
    return out


def test_trainer_and_engine_agree_on_one_device(tmp_path: Path) -> None:
    hf = tiny()
    write_checkpoint(tmp_path / "hf", hf, felt_tensors(hf))
    found = run_ranks(turns, 1, str(tmp_path / "hf"), "cuda", timeout_s=500)[0]
    for step in found:
        print(step)
        assert step["kl"] < KL
        assert step["routing/replay_coverage"] == 1.0

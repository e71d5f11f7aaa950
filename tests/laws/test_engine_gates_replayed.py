"""Law: with replay.gates the trainer weights each expert as the engine did, whatever its own routers say.

Experts and gates then both come out of a server's reply, so a trainer whose routers are others still gives the
rollout's log-probs, and its routers get no gradient. A gate lost, scaled or normalized once more, or at another
expert's or token's place, shows as a gap; so does a trainer that computes the gates itself (replay without gates).

The embedded engine over HTTP, prompts of unequal length that share their prefill, a trainer of one rank in fp32. Not
covered: bf16, layouts (test_replay_layouts.py cuts gates as it cuts ids), stock SGLang, which returns none.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.batch.packing import pack
from miles_like.types import Prompt, SampleGroup, SamplingParams, TrainBatch
from rollout.sglang.client import SGLangClient
from rollout.sglang.samples import RoutingShape
from tests.support import toy
from tests.support.embedded_fixtures import served, service
from tests.support.refusals import refuses
from tests.support.spawn import free_port, run_ranks
from tests.support.tiny_models import felt_tensors, tiny, write_checkpoint

HF = tiny(torch_dtype="float32", routed_scaling_factor=2.5)
SHAPE = RoutingShape(num_layers=3, moe_layers=toy.LAYERS, top_k=toy.TOP_K, num_experts=toy.EXPERTS, gates=True)
PROMPTS = [Prompt(id=str(p), token_ids=tuple(range(p, 2 * p)), answer="") for p in (5, 12, 30)]
Found = dict[str, Any]


def _batch(hf: Path) -> TrainBatch:
    """Six samples of a server's, in two micro-batches or so."""
    s = service(hf, gates=True)
    s.engine.set_version("0")

    async def run(url: str) -> list[SampleGroup]:
        client = SGLangClient(url, routing=SHAPE)
        groups = await client.generate(PROMPTS, n=2, params=SamplingParams(max_new_tokens=8, sampling_seed=1))
        await client.close()
        return list(groups)

    with served(s) as url:
        groups = asyncio.run(run(url))
    return pack(groups, [[1.0, -1.0]] * len(groups), dp_size=1, max_tokens=80)


def _run(t: Any, row: Any, tokens: int) -> tuple[dict[str, float], list[float]]:
    """Metrics of a step that is not applied, and the norms of its gradients to the routers' weights."""
    metrics = dict(t._step.run(row, tokens))
    named = dict(t.models[0].named_parameters())
    return metrics, [float(named[f"decoder.layers.{i}.mlp.router.weight"].main_grad.norm()) for i in toy.LAYERS]


def _one_rank(rank: int, world: int, port: int, where: Path) -> Found:
    from megatron_bridge.convert.to_megatron import to_megatron

    hf = write_checkpoint(where / "hf", HF, felt_tensors(HF))
    to_megatron(hf, where / "shards")
    batch, out = _batch(hf), {}
    ((row),), tokens = batch.grid, batch.loss_tokens
    out["micro-batches"] = len(row)
    bare = [toy.with_trace(m, replace(m.routing, weights=None)) for m in row]
    for name, gates in (("gates", True), ("own gates", False)):
        cfg = toy.config(str(hf), replay={"mode": "r3", "gates": gates})
        with toy.trainer(cfg, rank, world, free_port()) as t:
            t.load_weights(where / "shards")
            out[name] = _run(t, row, tokens)
            if gates:
                with refuses(
                    ValueError, "has no gates, which replay.gates = true requires", unrecorded="raised in a rank"
                ):
                    t._step.run(bare, tokens)
                out["applied"] = t.step(row, tokens, 1).metrics
                t.load_weights(where / "shards")
            from megatron_bridge.model.build import routers

            g = torch.Generator().manual_seed(0)
            for router in routers(t.chunks):
                router.weight.data.add_(0.2 * torch.randn(router.weight.shape, generator=g))
            out[f"{name}, other routers"] = _run(t, row, tokens)
    return out


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(_one_rank, 1, tmp_path_factory.mktemp("gates"), keep=True)[0]  # type: ignore[no-any-return]


def test_gates_of_the_engine_are_those_of_the_trainer(found: Found) -> None:
    """With the same weights they change nothing, except that the routers get no gradient; the step completes."""
    gates, scored = found["gates"], found["own gates"]
    assert found["micro-batches"] > 1
    for metrics, _ in (gates, scored):
        assert metrics["routing/replay_coverage"] == metrics["routing/agreement"] == 1.0
        assert metrics["mismatch/logprob_abs_diff_max"] < 1e-4
    assert gates[1] == [0.0, 0.0] and min(scored[1]) > 1e-4
    assert found["applied"]["train/grad_norm"] > 0


def test_they_count_and_the_trainer_s_own_do_not(found: Found) -> None:
    gates, scored = found["gates, other routers"], found["own gates, other routers"]
    assert max(m["routing/agreement"] for m, _ in (gates, scored)) < 0.5
    assert gates[0]["mismatch/logprob_abs_diff_max"] < 1e-4
    assert scored[0]["mismatch/logprob_abs_diff_max"] > 1e-2

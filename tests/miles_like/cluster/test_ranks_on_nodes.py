"""Megatron ranks on two nodes: each has the node and GPU of its slot, and their step is, bit by bit, that of the same
layout without a cluster.

The nodes are on this machine and their GPUs are pretended: CUDA_VISIBLE_DEVICES names them, and torch for CPUs looks at
nothing of it. Not covered: several machines, GPUs.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_bridge.convert.to_megatron import to_megatron
from miles_like.batch.packing import cut_shard
from miles_like.cluster.factories import CheckpointWriter, MegatronFactory
from miles_like.cluster.placement import PlacementPlan
from miles_like.cluster.rank import Rank
from miles_like.cluster.run_nodes import RunNodes
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.types import TrainBatch
from tests.support import layouts, toy
from tests.support.placed import CONFIGS, RAYLET, SECRET, Placed, check_seen, places, reserved, run_nodes, shipped
from tests.support.pretended import pretended_cluster
from tests.support.reporting_rank import Reporting
from tests.support.spawn import run_ranks
from tests.support.tiny_models import felt_tensors, write_checkpoint

QWEN = next(path for path in CONFIGS if path.stem == "qwen3_30b_a3b")
MODEL = layouts.MODELS["gqa"] | {"num_key_value_heads": 4}  # as many as ranks of a tensor-parallel group
# slots are held by test_run_nodes.py, a step over two nodes by a whole run
pytestmark = pytest.mark.long(beside="tests/cluster/test_spread_run.py")
HOSTS = [9, 12]  # in the order of the run
LIMIT_S = 500.0
Step = tuple[Mapping[str, float], dict[str, bytes]]  # metrics of the step, files of the published weights


@pytest.mark.parametrize(
    ("per_node", "settings"),
    [
        (2, ("cluster.gpus_per_node=2", "parallel.tp=2", "parallel.dp=2", "parallel.ep=4", "rollout.servers=2")),
        (8, ()),
    ],
    ids=["2x2", "2x8"],
)
def test_a_step_of_ranks_on_two_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_node: int, settings: tuple[str, ...]
) -> None:
    """In the layout of a shipped configuration, where the ranks of an expert-parallel group are on both nodes with two
    GPUs each, and on one with eight."""
    one_thread = 'cluster.env={NCCL_DEBUG="INFO", WANDB_API_KEY="", OMP_NUM_THREADS="1"}'
    config, plan, _ = shipped(QWEN, one_thread, *settings)
    parallel = config.parallel
    hf = write_checkpoint(tmp_path / "hf", MODEL, felt_tensors(MODEL))
    to_megatron(hf, tmp_path / "shards")
    trained = toy.config(str(hf), tp=parallel.tp, dp=parallel.dp, ep=parallel.ep)
    factory = MegatronFactory(trained, tmp_path / "shards", layouts.WholeSamples())
    rows, tokens = toy.grid(layouts.batch(0), dp=parallel.dp, micros=1)
    batch = TrainBatch(grid=tuple(map(tuple, rows)), loss_tokens=tokens, versions=(0, 0))
    with pretended_cluster(HOSTS[::-1], RAYLET, gpus=per_node), reserved(2, per_node) as held:
        for name, value in SECRET.items():  # of the driver, not of the nodes' Ray
            monkeypatch.setenv(name, value)
        found = on_nodes(Reporting(factory, tmp_path), plan, run_nodes(config, held), batch, writer(hf, "placed"))
    on_all = places([0, 1], range(per_node))
    seen = {("trainer", r, 0): pickle.loads((tmp_path / str(r)).read_bytes()) for r in range(parallel.world_size)}
    check_seen(seen, Placed(on_all, on_all, 2, per_node), HOSTS, {"OMP_NUM_THREADS": "1"})
    assert len(seen) == 2 * per_node == len(plan.of("trainer"))
    local = run_ranks(without_cluster, parallel.world_size, factory, batch, writer(hf, "local"), timeout_s=LIMIT_S)
    assert found[0] == {"routing/bytes": found[0]["routing/bytes"]} | local[0]
    assert found[0]["routing/replay_coverage"] == 1.0 and found[0]["train/grad_norm"] > 0
    assert found[1] == files(tmp_path / "local") and found[1]["model.safetensors"] != files(hf)["model.safetensors"]


def writer(hf: Path, name: str) -> CheckpointWriter:
    return CheckpointWriter(out=hf.parent / name, hf_config=MODEL, spec=None, copy_from=hf)


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def on_nodes(
    factory: Reporting, plan: PlacementPlan, nodes: RunNodes, batch: TrainBatch, publisher: CheckpointWriter
) -> Step:
    async def step() -> Mapping[str, float]:
        logs = factory.where / "logs"
        trainer = RayTrainer(factory, plan.of("trainer"), nodes, len(batch.grid), logs, timeout_s=LIMIT_S)
        try:
            trainer.connect(publisher)
            metrics = (await trainer.train([batch])).metrics
            await trainer.publish(version=1)
        finally:
            await trainer.close()
        return dict(metrics)

    return asyncio.run(step()), files(publisher.out)


def without_cluster(
    rank: int, world: int, port: int, factory: MegatronFactory, batch: TrainBatch, publisher: CheckpointWriter
) -> dict[str, float]:
    """One rank in a process that nothing has placed; rank 0 writes the weights."""
    one = Rank()
    dp_rank, part = one.start(factory, rank, world, "127.0.0.1", port)
    one.connect(publisher)
    row = batch.grid[dp_rank]
    report = one.train([batch.loss_tokens], 1, [1], [replace(m, routing=None) for m in row], cut_shard(row, part))
    one.publish(1)
    one.close()
    return dict(report.metrics)

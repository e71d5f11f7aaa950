"""What a run's configuration alone determines: sizes, and refusals that would otherwise come after hours of fetching
and converting."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.pipeline.stages import Stage, plan_stages
from miles_like.run.assemble import known_model, stage_functions
from miles_like.run.setup.delivery import TrainerPublication
from miles_like.run.setup.model_plan import model_plan, planned_model
from miles_like.run.setup.run_cluster import RunCluster
from miles_like.run.train import TrainingRun
from quant.hf_config import spec_to_hf
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec
from tests.support.refusals import Facts, refuses
from tests.support.tiny_models import random_tensors, tiny_dense, tiny_qwen, write_checkpoint

TINY = Path(__file__).parents[4] / "configs" / "tiny.toml"
FP8 = QuantSpec.of(QuantFormat.FP8)
_INT4 = ["precision.format=int4", "precision.qat=false", "precision.allow_without_qat=true"]


def _plan(config: RunConfig, where: Path) -> dict[str, Stage]:
    console = Console(file=io.StringIO())
    cluster = RunCluster(config, where / "run", console, None)
    parts = stage_functions(config, known_model(config), console, cluster)
    return {stage.name: stage for stage in plan_stages(config, where / "run", parts)}


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        # no trainer would round, so that nothing but the stored shape says that it does not fit
        ([*_INT4, "precision.block=[1, 48]"], (48, "model.layers.1.mlp.experts.0.gate_proj.weight", "int4")),
        (["precision.block=[64, 64]"], ("precision.block", "[64, 64]", "[128, 128]")),  # made in FP8
        (
            [
                "precision.format=int4",
                "precision.qat=true",
                "precision.block=[1, 64]",
                "parallel.etp=2",
                "parallel.ep=1",
            ],
            (1, "precision.qat", "model.layers.1.mlp.experts.0.down_proj.weight"),
        ),
        (["precision.activations=fp8"], (128,)),
        (["lora.rank=4", "kernels.fp8=blockwise"], ("kernels.fp8",)),
    ],
    ids=["shape", "made", "ranks", "inputs", "kernels"],
)
def test_a_run_that_cannot_be_is_refused_before_anything_is_made(
    settings: list[str], facts: Facts, tmp_path: Path
) -> None:
    with refuses(ValueError, *facts):
        _plan(load_config(TINY, settings), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_weight_quantized_without_one_that_shares_its_scale_is_refused(tmp_path: Path) -> None:
    spec = QuantSpec(format=QuantFormat.NVFP4, ignore=("model.layers.1.mlp.experts.3.up_proj", "self_attn"))
    hf = tiny_qwen(quantization_config=spec_to_hf(spec))
    write_checkpoint(tmp_path / "hf", hf, random_tensors(hf))
    config: dict[str, Any] = {
        "model": {"path": str(tmp_path / "hf")},
        "data": {"train": str(TINY)},
        "precision": {"format": "nvfp4", "qat": True},
    }
    with refuses(
        ValueError, "model.layers.1.mlp.experts.3.gate_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"
    ):
        _plan(RunConfig.model_validate(config), tmp_path)


def test_a_critic_that_its_ranks_cannot_build_is_refused_before_they_start(tmp_path: Path) -> None:
    """Also of a model on the hub, known once it is fetched. The policy's ranks build megatron's local modules, which
    round inputs; the critic's build TransformerEngine's, which lack a bias of this model."""
    hf = tiny_dense(attention_bias=True, hidden_size=256, head_dim=64, quantization_config=spec_to_hf(FP8))
    write_checkpoint(tmp_path / "hf", hf, random_tensors(hf))
    config: dict[str, Any] = {
        "model": {"path": "owner/name"},
        "data": {"train": str(TINY)},
        "precision": {"format": "fp8", "activations": "fp8", "qat": True},
        "cluster": {"gpus_per_node": 4},
    }
    alone = RunConfig.model_validate(config)
    assert known_model(alone) is None and planned_model(alone, hf, tmp_path / "hf").critic is None
    critic = RunConfig.model_validate(config | {"algorithm": {"name": "ppo"}})
    with refuses(ValueError, "self_attention.linear_proj", "kernels.spec", "local"):
        model_plan(critic, tmp_path / "run", tmp_path / "hf", tmp_path / "megatron")


def test_sizes_are_those_of_the_format_that_is_made_and_of_the_one_that_is_served(tmp_path: Path) -> None:
    def sizes(*settings: str) -> tuple[int, int]:
        planned = _plan(load_config(TINY, [*settings]), tmp_path)
        fetched, stage = planned["fetch"].size, planned["stage"].size
        assert fetched is not None and stage is not None and planned["convert"].size is not None
        return fetched, stage - planned["convert"].size

    fp8, served = sizes()
    bf16, as_fp8 = sizes("model.make.format=bf16")
    assert fp8 == served == as_fp8 and 1.8 * fp8 < bf16 < 2 * fp8
    made, as_int4 = sizes("model.make.format=bf16", *_INT4)
    assert made == bf16 and as_int4 < bf16


def test_a_stage_of_another_format_is_another_stage(tmp_path: Path) -> None:
    """What was staged for one way of serving is never served for another; the shards are shared."""
    ways: list[list[str]] = [
        [],
        ["precision.block=[32, 32]"],
        ["precision.scope=experts"],
        ["precision.format=fp8-ue8m0"],
        ["precision.format=mxfp8"],
        ["precision.format=mxfp8", "precision.convention=compressed-tensors"],
        _INT4,
    ]
    plans = [_plan(load_config(TINY, ["model.make.format=bf16", *way]), tmp_path) for way in ways]
    assert len({plan["convert"].key for plan in plans}) == 1
    for name in ("stage", "train"):
        assert len({plan[name].key for plan in plans}) == len(ways)


@pytest.mark.parametrize("qat", [False, True])
def test_servers_begin_with_what_the_trainer_rounds_to(qat: bool, tmp_path: Path) -> None:
    """INT4 of compressed-tensors uses -8 .. 7: served as fetched, those codes are not the ones that training through
    the rounding computes with."""
    w = {"model.layers.0.mlp.up_proj.weight": torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()}
    codec = make_codec(spec := QuantSpec(format=QuantFormat.INT4))
    scale = (w[next(iter(w))].float().unflatten(1, (-1, 32)).abs().amax(-1) / 7.5).bfloat16()
    theirs = w[next(iter(w))].float().unflatten(1, (-1, 32)).div(scale.float()[..., None]).round().clamp(-8, 7)
    decoded = (theirs * scale.float()[..., None]).flatten(1).bfloat16()
    assert (codec.fake({"w": decoded})["w"] != decoded).float().mean() > 0.1 and spec.block == (1, 32)

    published: list[int] = []

    class Trainer:
        async def publish(self, *, version: int) -> None:
            published.append(version)

    run = TrainingRun.__new__(TrainingRun)
    run.config, run.resumed = load_config(TINY, [f"precision.qat={str(qat).lower()}"]), None
    trainer: Any = Trainer()
    run.models = {"trainer": trainer}
    run.publication = TrainerPublication(cast(Any, None), trainer, goes_on=False)
    scored: list[int] = []

    class Checks:
        async def before_publication(self) -> None:
            scored.append(len(published))

    checks: Any = Checks()
    assert asyncio.run(run.publish_first(checks)) == (0, None)
    assert published == ([0] if qat else []) and scored == [0], "scored before anything is published"

"""Make a checkpoint for the fetch stage where none can be downloaded, by default in DeepSeek's FP8 layout.

Random weights -> Hugging Face BF16 -> Megatron shards -> supervised warm-up by the trainer that reinforcement learning
will use -> Hugging Face FP8, or another format. Except for the random weights, a real checkpoint passes the same code.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from megatron_bridge.config import OptimizerConfig, PrecisionConfig, ReplayConfig, TrainerConfig
from megatron_bridge.convert.to_megatron import to_megatron
from megatron_bridge.families.registry import family_of
from miles_like.algorithms.sft import NllLoss
from miles_like.cluster.factories import CheckpointWriter, MegatronFactory
from miles_like.cluster.placement import plan_placement
from miles_like.cluster.run_nodes import RunNodes
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.config.run import RunConfig
from miles_like.config.sections.make import MakeConfig
from miles_like.config.sections.supervised import SupervisedConfig
from miles_like.hf.checkpoint import read_config_file, write_hf
from miles_like.pipeline.warmup import random_weights, warm_up
from miles_like.supervised.data import EndingTokenizer, ExampleReader
from miles_like.types import SampleGroup
from quant.hf_config import quantized_config
from quant.spec import QuantFormat
from rollout.prompts.config import DataConfig

_BIAS_RATE = 1e-3  # DeepSeek-V3's (arXiv 2412.19437, section 4.2)


def make_checkpoint(config: RunConfig, out: Path, console: Console, nodes: Callable[[], RunNodes]) -> None:
    """Write the checkpoint that `config.model.make` describes to `out`; print a message if the warm-up misses its
    target. nodes: the run's, asked for when ranks are started."""
    make = config.model.make
    assert make is not None
    hf_config = read_config_file(Path(make.config))
    scratch = Path(tempfile.mkdtemp(prefix="make-", dir=out.parent))
    try:
        bf16, shards = scratch / "bf16", scratch / "megatron"
        shapes = {p.hf_name: p.shape for p in family_of(hf_config).bind(hf_config).places()}
        write_hf(bf16, random_weights(shapes, hf_config, make.seed), hf_config)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy2(Path(make.tokenizer) / name, bf16 / name)
        to_megatron(bf16, shards)
        _warm_up_and_write(config, make, bf16, shards, hf_config, out, console, nodes)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _warm_up_and_write(
    config: RunConfig,
    make: MakeConfig,
    bf16: Path,
    shards: Path,
    hf_config: dict[str, Any],
    out: Path,
    console: Console,
    nodes: Callable[[], RunNodes],
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(bf16)  # its annotations take lists, not sequences
    corpus = [example for path in make.corpora for example in _read(config, tokenizer, path, make.answer_key)]
    validation = _read(config, tokenizer, make.validation, "answer")
    plan = plan_placement(config.cluster, config.parallel, config.servers)
    trainer = RayTrainer(
        MegatronFactory(_trainer_config(config, make, bf16, hf_config), shards, NllLoss()),
        plan.of("trainer"),
        nodes(),
        dp_size=config.parallel.dp,
        log_dir=out.parent / "logs",
        timeout_s=config.cluster.timeout_s,
    )

    async def run() -> None:
        report = await warm_up(
            trainer,
            make,
            corpus=corpus,
            validation=validation,
            max_tokens=config.max_pack_tokens,
            micro_multiple=config.parallel.micro_multiple,
            progress=_progress_printer(console, make),
        )
        if make.max_steps and not report.reached:
            console.print(
                f"{'':12}Warm-up stopped after {report.steps} steps: p(right answer) {report.right_prob:.3f} is below "
                f"model.make.target = {make.target}",
                highlight=False,
                soft_wrap=True,
            )
        spec = make.spec()
        trainer.connect(
            CheckpointWriter(out=out, hf_config=quantized_config(hf_config, spec), spec=spec, copy_from=bf16)
        )
        await trainer.publish(version=0)
        await trainer.close()

    asyncio.run(run())


def _read(config: RunConfig, tokenizer: EndingTokenizer, path: str, answer_key: str) -> Sequence[SampleGroup]:
    return ExampleReader(
        tokenizer=tokenizer,
        data=DataConfig(train=path, answer_key=answer_key, max_prompt_tokens=config.max_pack_tokens),
        keys=SupervisedConfig(),
        algorithm="sft",
        max_tokens=config.max_pack_tokens,
    ).read(path)


def _progress_printer(console: Console, make: MakeConfig) -> Callable[[int, float], None]:
    began = time.perf_counter()

    def progress(step: int, right: float) -> None:
        if step % (4 * make.check_every) == 0 or right >= make.target:
            console.print(
                f"{'':12}Warm-up step {step}: p(right answer) {right:.3f}, target {make.target:.3f}, "
                f"{time.perf_counter() - began:.0f} s",
                highlight=False,
                soft_wrap=True,
            )

    return progress


def _trainer_config(config: RunConfig, make: MakeConfig, hf_dir: Path, hf_config: dict[str, Any]) -> TrainerConfig:
    rate = make.router_bias_update_rate
    if rate is None:
        keywords = family_of(hf_config).transformer_config(hf_config)
        rate = _BIAS_RATE if keywords.get("moe_router_enable_expert_bias") else 0.0
    return TrainerConfig(
        hf_config=str(hf_dir),
        parallel=config.parallel,
        precision=PrecisionConfig(format=QuantFormat.BF16),  # whatever the run's format is
        optimizer=OptimizerConfig(lr=make.lr, warmup_steps=make.lr_warmup_steps, beta2=0.98),
        replay=ReplayConfig(mode="off"),
        seed=make.seed,
        router_bias_update_rate=rate,
    )

"""Configurations of the trainer ranks and of the critic ranks, from a run's configuration. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypedDict

from megatron_bridge.config import LoraConfig, OptimizerConfig, PrecisionConfig, ReplayConfig, TrainerConfig
from miles_like.config.run import RunConfig
from miles_like.config.sections.supervised import WITH_SCALAR_HEAD
from quant.spec import QuantFormat


def trainer_config(run: RunConfig, hf_dir: Path) -> TrainerConfig:
    """The configuration of each trainer rank; `hf_dir` holds the model's config.json. The ranks keep the weights of the
    reference unless these have separate ranks."""
    own = run.algorithm.keeps_reference and run.cluster.pools.reference is None
    return TrainerConfig(
        hf_config=str(hf_dir.resolve()),
        parallel=run.parallel,
        precision=run.precision,
        optimizer=run.optimizer.over(run.train.optimizer_steps),
        replay=run.replay,
        kernels=run.kernels,
        lora=run.lora,
        seed=run.seed,
        temperature=run.rollout.temperature,
        router_bias_update_rate=run.train.router_bias_update_rate,
        router_aux_loss=run.train.router_aux_loss,
        recompute=run.train.recompute,
        recompute_modules=run.train.recompute_modules,
        mtp_coefficient=run.train.mtp_coefficient,
        reference=own or run.distillation.reference,
        reference_for_loss=own,
        reference_every=0 if run.algorithm.supervised else run.algorithm.parts.reference_every,
        head="scalar" if run.algorithm.name in WITH_SCALAR_HEAD else "lm",
        on_nonfinite=run.train.on_nonfinite,
        deterministic=run.alignment.deterministic,
    )


class _CriticKeys(TypedDict):
    """Fields of TrainerConfig that a critic has otherwise than the trainer."""

    head: Literal["lm", "scalar"]
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    replay: ReplayConfig
    lora: LoraConfig
    reference: bool
    reference_every: int
    mtp_coefficient: float


def critic_config(run: RunConfig, trainer: TrainerConfig) -> TrainerConfig | None:
    """The configuration of each critic rank, derived from that of the trainer ranks; None: there is no critic.

    The critic is not served, so all its weights are trained in BF16: no quantization, routing replay, adapters or draft
    layers.
    """
    if not run.algorithm.has_critic:
        return None
    lr = trainer.optimizer.lr if run.critic.lr is None else run.critic.lr
    own: _CriticKeys = {
        "head": "scalar",
        "optimizer": trainer.optimizer.model_copy(update={"lr": lr}),  # its min_lr may be larger: the critic keeps it
        "precision": PrecisionConfig(format=QuantFormat.BF16),
        "replay": ReplayConfig(mode="off"),
        "lora": LoraConfig(),
        "reference": False,
        "reference_every": 0,
        "mtp_coefficient": 0.0,
    }
    return TrainerConfig.model_validate({**dict(trainer), **own})


class _ReferenceKeys(TypedDict):
    """Fields of TrainerConfig that ranks of the reference have otherwise than the trainer."""

    trains: bool
    optimizer: OptimizerConfig
    replay: ReplayConfig
    reference: bool
    reference_for_loss: bool
    mtp_coefficient: float


def reference_config(run: RunConfig, trainer: TrainerConfig) -> TrainerConfig | None:
    """The configuration of each rank that computes log-probabilities under the reference's weights only; None: the
    trainer ranks swap these weights in, or there is no reference.

    With quantized weights these ranks round as the trainer's do for their copy of the reference.
    """
    if run.cluster.pools.reference is None:
        return None
    own: _ReferenceKeys = {
        "trains": False,
        "optimizer": OptimizerConfig(),
        "replay": ReplayConfig(mode="off"),
        "reference": False,
        "reference_for_loss": False,
        "mtp_coefficient": 0.0,
    }
    return TrainerConfig.model_validate({**dict(trainer), **own})

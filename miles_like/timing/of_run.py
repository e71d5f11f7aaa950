"""Converts a run's configuration into the setup whose step time is predicted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_bridge.config import TrainerConfig
from megatron_bridge.families.base import HFConfig
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.precision import served_spec
from megatron_bridge.plan.recompute import recompute_settings
from miles_like.config.ranks import trainer_config
from miles_like.config.run import RunConfig
from miles_like.device_table import Device
from miles_like.timing.engine import EngineSetup
from miles_like.timing.layers import LayerSetup
from miles_like.timing.publish import PublishSetup
from miles_like.timing.rates.calibration import IMBALANCE, SHARED_DISK
from miles_like.timing.step import RewardSetup, StepSetup
from miles_like.timing.train import TrainSetup
from miles_like.timing.workload import Lengths, Workload, lengths_with_mean
from quant.spec import FOUR_BIT, QuantFormat, QuantSpec

# Of their limits, where nothing is known of a run's data: prompts, and responses.
PROMPT_SHARE = 0.1
RESPONSE_SHARE = 0.4
CALLS = 64  # concurrent calls of a reward, where reward.concurrency is not given
NOWHERE = Path(".")  # of config.json, which is given
_SCALE_BITS = {  # of one scale
    QuantFormat.FP8: 32,
    QuantFormat.FP8_UE8M0: 32,
    QuantFormat.INT4: 16,
    QuantFormat.MXFP8: 8,
    QuantFormat.MXFP4: 8,
    QuantFormat.NVFP4: 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a run that its configuration does not contain. Lengths that are None are assumed: PROMPT_SHARE and
    RESPONSE_SHARE of the configuration's limits."""

    device: Device
    prompt: float | None = None
    """Tokens of a prompt on average."""
    responses: Lengths | None = None
    cache_tokens: float = float("inf")
    """Tokens that a server's cache holds."""
    reward_s: float = 0.0
    """Seconds of one score."""
    trained: float = 1.0
    """Share of the parameters that have gradients, with adapters."""
    imbalance: float = IMBALANCE
    """Rows of the busiest expert-parallel rank over the average."""


LOGIT_BYTES = 8  # temporaries per logit of a block


def element_bytes(spec: QuantSpec | None) -> float:
    """Bytes of one weight stored as `spec`, including its share of a scale; 2 for BF16."""
    if spec is None or spec.format is QuantFormat.BF16:
        return 2.0
    bits = 4 if spec.format in FOUR_BIT else 8
    return (bits + _SCALE_BITS[spec.format] / (spec.block[0] * spec.block[1])) / 8


def step_setup(run: RunConfig, hf: HFConfig, facts: Facts) -> StepSetup:
    """The setup of a run with a rollout. Raises ValueError for one without, which has no step of this kind."""
    if run.servers is None:
        raise ValueError(f"algorithm.name = {run.algorithm.name!r} has no rollout, so its time cannot be predicted")
    load = workload(run, facts)
    engine = engine_setup(run, hf, facts)
    train = train_setup(run, hf, facts, load)
    world, colocated = run.parallel.world_size, run.takes_turns
    publish = PublishSetup(
        # beside training every path begins with files; what the driver sends of them is taken to be as fast as a read
        path="disk" if run.publish.during_training else run.publish.path,
        device=facts.device,
        ranks=world,
        engine=engine,
        disk=SHARED_DISK,
        colocated=colocated,
        stages=run.parallel.pp,
    )
    return StepSetup(
        train=train,
        publish=publish,
        load=load,
        gpus=max(world, engine.gpus) if colocated else world + engine.gpus,
        colocated=colocated,
        staleness=float(run.buffer.slack),
        ahead=run.buffer.over_sampling,
        loads_beside=run.publish.during_training,
        rounds=run.in_lockstep,
        reward=RewardSetup(seconds=facts.reward_s, at_once=run.reward.concurrency or CALLS),
    )


def workload(run: RunConfig, facts: Facts) -> Workload:
    """The number and lengths of the samples of a step."""
    limit = run.rollout.longest_answer
    responses = facts.responses or lengths_with_mean(max(1.0, RESPONSE_SHARE * limit), limit)
    prompt = PROMPT_SHARE * run.data.max_prompt_tokens if facts.prompt is None else facts.prompt
    return Workload(
        groups=run.train.groups_per_step,
        samples_per_group=run.train.samples_per_group,
        prompt=prompt,
        responses=responses,
        steps_per_rollout=run.train.steps_per_rollout,
    )


def engine_setup(run: RunConfig, hf: HFConfig, facts: Facts) -> EngineSetup:
    """The setup of the rollout's servers, from the flags that stock SGLang gets."""
    flags, spec = run.rollout.sglang, served_spec(run.precision, hf)
    quantized = element_bytes(spec)
    experts_only = spec is not None and not spec.covers("model.layers.0.self_attn.o_proj.weight", (128, 128))
    deepep = flags.moe_a2a_backend == "deepep"
    cache = 1.0 if flags.kv_cache_dtype.startswith("fp8") else 2.0
    return EngineSetup(
        device=facts.device,
        servers=run.rollout.servers,
        tp=flags.tp_size,
        ep=flags.ep_size,
        dp=flags.dp_size if flags.enable_dp_attention else 1,
        deepep=deepep,
        replicated_dense=flags.moe_dense_tp_size == 1,
        weight_bytes=2.0 if experts_only else quantized,
        expert_bytes=quantized,
        cache_bytes=cache,
        fp8=spec is not None and spec.format in (QuantFormat.FP8, QuantFormat.FP8_UE8M0, QuantFormat.MXFP8),
        cache_tokens=facts.cache_tokens,
        max_running=flags.max_running_requests or 1024,
    )


def layer_setup(trainer: TrainerConfig, hf: HFConfig, facts: Facts) -> LayerSetup:
    """The setup of a trainer rank's layers."""
    device = facts.device
    keywords = family_of(hf).transformer_config(hf) | {"moe_grouped_gemm": trainer.kernels.grouped_gemm}
    chosen = recompute_settings(trainer, keywords).get("recompute_modules") or ()
    return LayerSetup(
        device=device,
        parallel=trainer.parallel,
        recompute=trainer.recompute,
        again=frozenset(chosen),
        fp8=trainer.kernels.fp8 != "none" and device.fp8 is not None,
        dispatcher=trainer.kernels.dispatcher,
        adapters=trainer.lora.rank > 0,
        imbalance=facts.imbalance,
        mtp=family_of(hf).mtp_layers(hf) if trainer.mtp_coefficient else 0,
    )


def train_setup(run: RunConfig, hf: HFConfig, facts: Facts, load: Workload) -> TrainSetup:
    """How a rank computes a rollout: passes under the old policy come with several optimizer steps, or with the routes
    of mode r2; a pass under the reference's weights, which the ranks swap in, with a penalty."""
    trainer = trainer_config(run, NOWHERE)
    old = run.train.steps_per_rollout > 1 or run.replay.mode == "r2"
    reference = trainer.reference and trainer.reference_for_loss
    loss_share = load.responses.mean / (load.prompt + load.responses.mean)
    return TrainSetup(
        layer=layer_setup(trainer, hf, facts),
        pack_tokens=run.max_pack_tokens,
        overlap_grads=run.kernels.overlap_grad_reduce,
        overlap_params=run.kernels.overlap_param_gather,
        offload=run.kernels.offload_optimizer,
        passes=float(old) + float(reference),
        swaps=float(reference),
        rounded=run.precision.qat,
        loss_share=loss_share,
        trained=facts.trained,
        head_columns=block_columns(trainer, run.max_pack_tokens, loss_share),
        head_sum_bytes=4,
    )


def block_columns(trainer: TrainerConfig, pack_tokens: int, loss_share: float) -> int:
    """Entries of the vocabulary in a block of logits of the rows with loss: as megatron_bridge/model/logprobs.py, where
    the rank's share of the vocabulary is not smaller."""
    rows = max(1, round(loss_share * pack_tokens / trainer.parallel.cp))
    columns = max(1, (trainer.logprob_memory_mib << 20) // (LOGIT_BYTES * rows))
    return columns - columns % 64 if columns > 64 else columns

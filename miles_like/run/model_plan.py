"""A run's model, layout and placement, derived once from its configuration and the model's config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from megatron_bridge.config import AgreementConfig, TrainerConfig
from megatron_bridge.families.base import Family
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.layout import check_layout
from megatron_bridge.plan.precision import served_spec
from megatron_bridge.plan.resolve import resolve
from miles_like.cluster.placement import PlacementPlan, plan_placement
from miles_like.config.ranks import trainer_config
from miles_like.config.run import RunConfig
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.hf.tokenizer import load_tokenizer
from miles_like.run.engine_support import check_engine
from miles_like.supervised.data import EndingTokenizer
from miles_like.verify.allowance import agreement_bounds
from quant.hf_config import spec_from_hf
from quant.spec import QuantSpec
from rollout.sglang.samples import RoutingShape


class RunTokenizer(EndingTokenizer, Protocol):
    """What a run needs of a Hugging Face tokenizer."""

    def get_vocab(self) -> dict[str, int]: ...


def run_tokenizer(directory: Path) -> RunTokenizer:
    """The tokenizer of a Hugging Face directory. Raises ValueError as `load_tokenizer`."""
    return cast(RunTokenizer, load_tokenizer(directory))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """Model, layout and placement that trainer and servers of a run are built from; the result of `model_plan`."""

    config: RunConfig
    run_dir: Path
    served: Path  # Hugging Face directory that servers load
    weights: Path  # Megatron shards that ranks load
    hf: HFCheckpoint  # of `served`
    family: Family
    spec: QuantSpec | None  # how served weights are stored; None: BF16
    trainer: TrainerConfig  # of each trainer rank
    placement: PlacementPlan
    tokenizer: RunTokenizer

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.run_dir / "logs"

    def routing_shape(self) -> RoutingShape | None:
        """The shape of the expert routes that servers return with each token. None for a model without experts, and
        where routes and log-probabilities of a token may be of different weight versions."""
        hf = self.hf.config
        layers = self.family.moe_layers(hf)
        if not layers or not self.config.routes_belong_to_their_log_probs:
            return None
        return RoutingShape(
            num_layers=self.family.num_layers(hf),
            moe_layers=layers,
            top_k=self.family.top_k(hf),
            num_experts=self.family.num_experts(hf),
            gates=self.config.rollout.embedded.return_gates,
        )


def model_plan(config: RunConfig, run_dir: Path, served: Path, weights: Path) -> ModelPlan:
    """The plan, from the configuration and the config.json of `served`; starts no process. Raises ValueError for a
    layout, precision, engine or cluster that does not fit the model."""
    hf = HFCheckpoint(served)
    family = family_of(hf.config)
    check_layout(config.parallel, hf.config)
    spec = _stored_spec(config, hf, served)
    trainer = trainer_config(config, served)
    cuda = config.cluster.gpus_per_node > 0
    resolve(trainer, hf.config, cuda=cuda, te=cuda)
    tokenizer = run_tokenizer(served)
    placement = plan_placement(config.cluster, config.parallel, config.servers)
    if config.servers is not None:
        check_engine(config.servers, config.precision, hf.config)
        if (bounds := _agreement(config, family, hf)) is not None:
            trainer = trainer.model_copy(update={"agreement": bounds})
    return ModelPlan(
        config=config,
        run_dir=run_dir,
        served=served,
        weights=weights,
        hf=hf,
        family=family,
        spec=spec,
        trainer=trainer,
        placement=placement,
        tokenizer=tokenizer,
    )


def _stored_spec(config: RunConfig, hf: HFCheckpoint, served: Path) -> QuantSpec | None:
    spec, want = spec_from_hf(hf.config), served_spec(config.precision, hf.config)
    if spec != want:
        stored = "BF16" if spec is None else spec.format.value
        raise ValueError(
            f"precision.format = {config.precision.format.value!r}, but {served} holds {stored} weights: "
            "run the stage that makes it again (--stages stage,train)"
        )
    return spec


def _agreement(config: RunConfig, family: Family, hf: HFCheckpoint) -> AgreementConfig | None:
    """None where no route of the rollout is replayed. Raises as `agreement_bounds`."""
    if config.replay.mode != "r3" or not family.moe_layers(hf.config):
        return None
    return agreement_bounds(
        config.mismatch.expert_agreement_min,
        config.mismatch.layer_agreement_min,
        config.precision,
        engine=config.rollout.engine,
        exact=config.exact_steps,
        more=config.one_side_rounds,
        stale=config.buffer.slack > 0,
        top_k=family.top_k(hf.config),
        num_experts=family.num_experts(hf.config),
    )

"""A run's model, layout and placement, derived once from its configuration and the model's config.json.

`planned_model` is the one place before the processes of a run that checks whether a model fits it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from megatron_bridge.config import AgreementConfig, TrainerConfig
from megatron_bridge.families.base import Family
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.layout import check_layout
from megatron_bridge.plan.precision import served_spec
from megatron_bridge.plan.resolve import Resolved, resolve, trained_config
from miles_like.algorithms.distillation import with_teachers
from miles_like.algorithms.registry import make_algorithm
from miles_like.alignment.allowance import agreement_bounds
from miles_like.cluster.placement import PlacementPlan, plan_placement
from miles_like.config.ranks import critic_config, reference_config, trainer_config
from miles_like.config.run import RunConfig
from miles_like.hf.checkpoint import HFCheckpoint, read_config
from miles_like.hf.tokenizer import load_tokenizer
from miles_like.protocols import Algorithm
from miles_like.run.setup.engine_support import check_engine
from miles_like.storage.fencing import Fence
from miles_like.supervised.data import EndingTokenizer
from quant.hf_config import quantized_config, spec_from_hf
from quant.spec import QuantSpec
from rollout.sglang.samples import RoutingShape


class RunTokenizer(EndingTokenizer, Protocol):
    """What a run needs of a Hugging Face tokenizer."""

    def get_vocab(self) -> dict[str, int]: ...


def run_tokenizer(directory: Path) -> RunTokenizer:
    """The tokenizer of a Hugging Face directory. Raises ValueError as `load_tokenizer`."""
    return cast(RunTokenizer, load_tokenizer(directory))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model that fits a run: its layout, precision, kernels, engine and critic; the result of `planned_model`."""

    hf: Mapping[str, Any]  # config.json of the checkpoint that servers load
    family: Family
    stored: QuantSpec | None  # how the given checkpoint stores weights; None: BF16
    spec: QuantSpec | None  # how the served checkpoint stores them
    trainer: TrainerConfig  # of each trainer rank
    critic: TrainerConfig | None  # of each critic rank; None: there is no critic
    reference: TrainerConfig | None  # of each rank in the reference's pool; None: it has none
    resolved: Resolved  # of the trainer ranks, on GPUs with TransformerEngine
    routing: RoutingShape | None  # of the expert routes that servers return with each token; None: they return none


def planned_model(config: RunConfig, hf: Mapping[str, Any], directory: Path) -> PlannedModel:
    """The plan of the model with config.json `hf` in `directory`, of the fetched or of the served checkpoint. Raises
    ValueError for a layout, precision, engine, kernels or critic that does not fit the model."""
    family, trainer, cuda = family_of(hf), trainer_config(config, directory), config.cluster.gpus_per_node > 0
    check_layout(config.parallel, trained_config(trainer, hf))
    if config.servers is not None:
        check_engine(config.servers, config.precision, hf, gpus_per_node=config.cluster.gpus_per_node)
        if (bounds := _agreement(config, family, hf)) is not None:
            trainer = trainer.model_copy(update={"agreement": bounds})
    stored, spec = spec_from_hf(hf), served_spec(config.precision, hf)
    served = hf if stored == spec else quantized_config(hf, spec)
    if (critic := critic_config(config, trainer)) is not None:
        valued = trained_config(critic, served)
        check_layout(config.parallel, valued)
        resolve(critic, valued, cuda=cuda, te=cuda)
    return PlannedModel(
        hf=served,
        family=family,
        stored=stored,
        spec=spec,
        trainer=trainer,
        critic=critic,
        reference=reference_config(config, trainer),
        resolved=resolve(trainer, trained_config(trainer, served), cuda=cuda, te=cuda),
        routing=_routing_shape(config, family, served),
    )


def _routing_shape(config: RunConfig, family: Family, hf: Mapping[str, Any]) -> RoutingShape | None:
    """None for a model without experts, and where routes and log-probabilities of a token may be of different weight
    versions."""
    layers = family.moe_layers(hf)
    if not layers or not config.routes_belong_to_their_log_probs:
        return None
    return RoutingShape(
        num_layers=family.num_layers(hf),
        moe_layers=layers,
        top_k=family.top_k(hf),
        num_experts=family.num_experts(hf),
        gates=config.rollout.embedded.return_gates,
    )


def _agreement(config: RunConfig, family: Family, hf: Mapping[str, Any]) -> AgreementConfig | None:
    """None where no route of the rollout is replayed. Raises as `agreement_bounds`."""
    if config.replay.mode != "r3" or not family.moe_layers(hf):
        return None
    return agreement_bounds(
        config.mismatch.expert_agreement_min,
        config.mismatch.layer_agreement_min,
        config.precision,
        engine=config.rollout.engine,
        exact=config.exact_steps,
        more=config.one_side_rounds,
        stale=config.buffer.slack > 0,
        top_k=family.top_k(hf),
        num_experts=family.num_experts(hf),
    )


@dataclass(frozen=True, slots=True)
class ServedDirectory:
    """The small files of the checkpoint that servers load. Its weights are on the nodes that have servers, and not
    necessarily on the driver's."""

    path: Path
    config: dict[str, Any]  # config.json

    def weights(self) -> HFCheckpoint:
        """The checkpoint with its weights. Raises ValueError on a machine that has no copy of them."""
        try:
            return HFCheckpoint(self.path)
        except ValueError as e:
            raise ValueError(
                f"{e}; only nodes with rollout servers have a copy of the weights; run this command on such a node"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """What trainer and servers of a run are built from; the result of `model_plan`."""

    config: RunConfig
    run_dir: Path
    served: Path  # Hugging Face directory that servers load
    weights: Path  # Megatron shards that ranks load
    hf: ServedDirectory  # of `served`
    model: PlannedModel
    placement: PlacementPlan
    tokenizer: RunTokenizer
    fence: Fence | None = None  # the epoch of `run_dir`; None: of what is no run, such as `miles-like verify`

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.run_dir / "logs"


def model_plan(config: RunConfig, run_dir: Path, served: Path, weights: Path, fence: Fence | None = None) -> ModelPlan:
    """The plan, from the configuration and the config.json of `served`; starts no process. Raises ValueError as
    `planned_model`, for weights of another format than the run's, and for a cluster that does not fit the run."""
    hf = ServedDirectory(served, read_config(served))
    model = planned_model(config, hf.config, served)
    if model.stored != model.spec:
        stored = "BF16" if model.stored is None else model.stored.format.value
        raise ValueError(
            f"precision.format = {config.precision.format.value!r}, but {served} contains {stored} weights: write "
            "it again with --stages stage,train"
        )
    return ModelPlan(
        config=config,
        run_dir=run_dir,
        served=served,
        weights=weights,
        hf=hf,
        model=model,
        placement=plan_placement(config.cluster, config.parallel, config.servers, config.teacher_rollouts),
        tokenizer=run_tokenizer(served),
        fence=fence,
    )


def run_algorithm(config: RunConfig) -> Algorithm:
    """The configured algorithm; with distillation, extended by the advantage or loss of the teachers."""
    return with_teachers(make_algorithm(config.algorithm, config.correction, config.mismatch), config.distillation)

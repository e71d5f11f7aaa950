"""Plans of shipped configurations, and of ranks that were executed."""

from __future__ import annotations

from pathlib import Path

from miles_like.config.load import load_config
from miles_like.config.ranks import trainer_config
from miles_like.config.run import RunConfig
from miles_like.planning.compose import IMBALANCE, step_shape
from miles_like.planning.memory.activations import StepShape
from miles_like.planning.memory.parts import GIB, Bytes, added, total
from miles_like.planning.memory.ranks import RankPlans
from miles_like.planning.plan import Plan
from miles_like.run.assemble import known_model, memory_plan
from miles_like.run.setup.model_plan import PlannedModel

CONFIGS = Path(__file__).parents[2] / "configs"


def path_of(name: str) -> Path:
    return CONFIGS / f"{name}.toml"


def shipped() -> list[str]:
    """Names of the configurations for GPUs."""
    paths = sorted(CONFIGS.glob("*.toml"))
    return [path.stem for path in paths if load_config(path).cluster.gpus_per_node]


def planned(name: str, *overrides: str, imbalance: float = IMBALANCE) -> Plan:
    config = load_config(path_of(name), overrides)
    return memory_plan(config, model_of(config), imbalance=imbalance)


def model_of(config: RunConfig) -> PlannedModel:
    model = known_model(config)
    assert model is not None
    return model


def trainer_ranks(name: str, *overrides: str, step: StepShape | None = None, imbalance: float = 1.0) -> RankPlans:
    """Of the trainer, as the tensors of the first rank of each stage are: without allowances."""
    config = load_config(path_of(name), overrides)
    return RankPlans(
        trainer_config(config, Path()),
        model_of(config).hf,
        step or step_shape(config),
        gpus=True,
        sleeps=config.takes_turns,
        publishes=True,
        imbalance=imbalance,
        data_rank=0,
    )


def tensors(plans: RankPlans, stage: int) -> dict[str, Bytes]:
    """Bytes that tensors take at the peak of each phase, by part."""
    return {phase: added(use.static, use.dynamic) for phase, use in plans.tensors(stage).items()}


def gib_of(plans: RankPlans, stage: int, phase: str = "training") -> float:
    return total(tensors(plans, stage)[phase]) / GIB

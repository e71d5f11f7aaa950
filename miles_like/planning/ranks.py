"""What one process of a trained model holds on its GPU in each phase of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron_bridge.config import TrainerConfig
from megatron_bridge.families.base import HFConfig
from megatron_bridge.plan.resolve import resolve, trained_config
from miles_like.planning.activations import StepShape, TrainingPasses, peak_parts
from miles_like.planning.allowances import FRAGMENTATION, trainer_allowances
from miles_like.planning.gathering import Gathering, gathering, gathering_bytes
from miles_like.planning.parts import Bytes, Part, Phase, added, total
from miles_like.planning.state import RankState, rank_state
from miles_like.planning.weights import ModelWeights, StageWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Bytes of one process. static: also while other processes of the GPU compute; dynamic: while it computes."""

    static: Bytes
    dynamic: Bytes


class RankPlans:
    """The ranks of one role: trainer, critic or reference.

    hf: config.json of the served checkpoint. gpus: on GPUs with TransformerEngine, where libraries take memory too.
    sleeps: the ranks take turns with servers. publishes: they send weights. Raises ValueError as `resolve`.
    """

    def __init__(
        self,
        config: TrainerConfig,
        hf: HFConfig,
        step: StepShape,
        *,
        gpus: bool,
        sleeps: bool,
        publishes: bool,
        imbalance: float,
    ) -> None:
        self.config, self.sleeps, self.publishes = config, sleeps, publishes
        self.weights = ModelWeights(config, hf)
        self.resolved = resolve(config, trained_config(config, hf), cuda=gpus, te=gpus)
        self.passes = TrainingPasses(self.weights, self.resolved, step, imbalance=imbalance)
        self.stages = self.weights.stages(config.parallel)
        self.states = tuple(rank_state(stage, config) for stage in self.stages)
        self.allowances: Bytes = trainer_allowances(config, self.weights.dims["hidden"]) if gpus else {}
        self._fragmentation = FRAGMENTATION if gpus else 0.0
        self._uses: dict[int, Mapping[Phase, Use]] = {}

    def gathered(self, stage: int) -> int:
        """The most that a rank of a stage holds for chunks of weights."""
        return gathering_bytes(self._chunks, stage)

    @cached_property
    def _chunks(self) -> tuple[Gathering, ...]:
        return tuple(gathering(self.weights, self.config.parallel, stage) for stage in self.stages)

    def uses(self, stage: int) -> Mapping[Phase, Use]:
        """By phase that the ranks have."""
        if stage not in self._uses:
            self._uses[stage] = self._of_stage(stage)
        return self._uses[stage]

    def _of_stage(self, stage: int) -> Mapping[Phase, Use]:
        state, of_stage = self.states[stage], self.stages[stage]
        peak = self.passes.peak(of_stage)
        dynamic: dict[Part, int] = {"activations": peak.activations, "logits": peak.logits}
        kept: dict[Part, int] = {"communication": peak.communication}
        awake = added(state.device, kept, self.allowances)
        left: dict[Part, int] = {"activations": peak.left}
        asleep = added(kept, left, self.allowances)
        out: dict[Phase, Use] = {
            "building": Use(static=added(self._building(of_stage, state), self.allowances), dynamic={}),
            "training": Use(static=awake, dynamic=self._with_fragments(dynamic)),
        }
        chunk: dict[Part, int] = {"communication": self.gathered(stage)} if self.publishes else {}
        sent = self._with_fragments(chunk)
        if not self.sleeps:
            out["publishing"] = Use(static=added(awake, left), dynamic=sent)
            return out
        lent: dict[Part, int] = {"parameters": state.device.get("parameters", 0)} if self.publishes else {}
        out["publishing"] = Use(static=added(asleep, lent), dynamic=sent)
        out["asleep"] = out["generating"] = Use(static=asleep, dynamic={})
        return out

    def _with_fragments(self, parts: Bytes) -> Bytes:
        fragments: dict[Part, int] = {"fragmentation": int(self._fragmentation * total(parts))}
        return added(parts, fragments)

    def _building(self, stage: StageWeights, state: RankState) -> Bytes:
        """The peak while everything is allocated; what is about to be freed counts as parameters."""
        more: dict[Part, int] = {"parameters": max(0, state.building - total(state.device))}
        return added(state.device, more)


def peak_of(plans: RankPlans, stage: int) -> Bytes:
    """Parts of the training peak without allowances."""
    return added(plans.states[stage].device, peak_parts(plans.passes.peak(plans.stages[stage])))

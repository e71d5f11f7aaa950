"""Bytes that one process of a trained model holds on its GPU in each phase of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron_bridge.config import TrainerConfig
from megatron_bridge.families.base import HFConfig
from megatron_bridge.plan.resolve import resolve, trained_config
from miles_like.planning.memory.activations import StepShape, TrainingPasses
from miles_like.planning.memory.allowances import FRAGMENTATION, trainer_allowances
from miles_like.planning.memory.gathering import Gathering, gathering, gathering_bytes
from miles_like.planning.memory.parts import Bytes, Part, Phase, added, total
from miles_like.planning.memory.state import rank_state
from miles_like.planning.memory.weights import ModelWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Bytes of one process. static: held also while other processes of the GPU compute; dynamic: only while it
    computes."""

    static: Bytes
    dynamic: Bytes


class RankPlans:
    """The ranks of one role: trainer, critic or reference.

    hf: config.json of the served checkpoint. gpus: on GPUs with TransformerEngine, where libraries take memory too.
    sleeps: the ranks take turns with servers. publishes: they send weights. data_rank: as
    `rank_state`. Raises ValueError as `resolve`.
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
        data_rank: int | None = None,
    ) -> None:
        self.config, self.sleeps, self.publishes = config, sleeps, publishes
        self.weights = ModelWeights(config, hf)
        self.resolved = resolve(config, trained_config(config, hf), cuda=gpus, te=gpus)
        self.passes = TrainingPasses(self.weights, self.resolved, step, gpus=gpus, imbalance=imbalance)
        self.stages = self.weights.stages(config.parallel)
        self.states = tuple(rank_state(stage, config, data_rank) for stage in self.stages)
        self.allowances: Bytes = trainer_allowances(config, self.weights.dims["hidden"]) if gpus else {}
        self._fragmentation = FRAGMENTATION if gpus else 0.0
        self._uses: dict[int, Mapping[Phase, Use]] = {}

    def uses(self, stage: int) -> Mapping[Phase, Use]:
        """Bytes by phase, of tensors and of allowances for libraries."""
        if stage not in self._uses:
            self._uses[stage] = {phase: self._whole(stage, phase, use) for phase, use in self.tensors(stage).items()}
        return self._uses[stage]

    def tensors(self, stage: int) -> Mapping[Phase, Use]:
        """Bytes of tensors by phase; the sending rank holds one chunk more during a publication."""
        state, peak = self.states[stage], self.passes.peak(self.stages[stage])
        awake = added(state.device, {"communication": peak.communication})
        tables: dict[Part, int] = {"activations": peak.tables}
        dynamic: dict[Part, int] = {"activations": peak.activations, "logits": peak.logits}
        chunk: dict[Part, int] = {"communication": gathering_bytes(self.chunks, stage) if self.publishes else 0}
        # what is about to be freed while everything is allocated counts as parameters
        moving: dict[Part, int] = {"parameters": max(0, state.building - total(state.device))}
        out: dict[Phase, Use] = {
            "building": Use(static=added(state.device, moving), dynamic={}),
            "training": Use(static=awake, dynamic=added(dynamic)),
        }
        if not self.sleeps:
            out["publishing"] = Use(static=added(awake, tables, {"activations": peak.left}), dynamic=added(chunk))
            return out
        lent: dict[Part, int] = {"parameters": state.device.get("parameters", 0)} if self.publishes else {}
        out["publishing"] = Use(static=added(tables, lent), dynamic=added(chunk))
        out["asleep"] = out["generating"] = Use(static=tables, dynamic={})
        return out

    @cached_property
    def chunks(self) -> tuple[Gathering, ...]:
        """The chunks that each stage gathers for a publication."""
        return tuple(gathering(self.weights, self.config.parallel, stage) for stage in self.stages)

    def _whole(self, stage: int, phase: Phase, use: Use) -> Use:
        dynamic = dict(use.dynamic)
        if phase == "publishing" and self.publishes and stage == 0:
            # the sender holds the tensors of a chunk of any stage until they are sent, while the next is gathered
            sent = max(max(g.chunk, self.chunks[stage].owned) for g in self.chunks)
            largest = max(chunks.chunk for chunks in self.chunks)
            dynamic["communication"] = max(dynamic.get("communication", 0), sent + largest)
        fragments: dict[Part, int] = {"fragmentation": int(self._fragmentation * total(dynamic))}
        return Use(static=added(use.static, self.allowances), dynamic=added(dynamic, fragments))

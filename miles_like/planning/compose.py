"""The plan of a run from its configuration: which processes share a GPU, what they hold, node by node."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_bridge.config import TrainerConfig
from megatron_bridge.families.base import HFConfig
from megatron_bridge.families.registry import family_of
from miles_like.cluster.placement import PlacementPlan, Role, Slot, plan_placement
from miles_like.config.ranks import critic_config, reference_config, trainer_config
from miles_like.config.run import RunConfig
from miles_like.config.sections.distillation import SwappedWeights
from miles_like.device_table import Device, device
from miles_like.planning.memory.activations import StepShape
from miles_like.planning.memory.engine import EnginePlan, engine_plan, published_bytes
from miles_like.planning.memory.host import DRIVER, Samples, driver_host, engine_host, rank_host, summed
from miles_like.planning.memory.parts import PHASES, Bytes, Phase, added, largest, total
from miles_like.planning.memory.ranks import RankPlans, Use
from miles_like.planning.plan import DiskPlan, HostPlan, Plan, StagePlan

IMBALANCE = 1.25  # rows of the busiest expert-parallel rank over the average: an assumption, --imbalance sets it
_ROLES: tuple[Role, ...] = ("trainer", "critic", "reference", "rollout")
Process = tuple[Role, int]  # role and pipeline stage; 0 for a server


def plan_run(
    config: RunConfig,
    hf: HFConfig,
    *,
    on: Device | None = None,
    disk: DiskPlan | None = None,
    imbalance: float = IMBALANCE,
) -> Plan:
    """hf: config.json of the served checkpoint. on: None: cluster.device. Raises ValueError for a layout that does not
    fit the model or the cluster."""
    return _Composer(config, hf, on or device(config.cluster.device), imbalance).plan(disk)


def step_shape(config: RunConfig) -> StepShape:
    """The micro-batches of one optimizer step of a rank, were every sample as long as it may be."""
    c, train = config, config.train
    tokens, packs = c.max_pack_tokens, c.parallel.micro_multiple
    if c.servers is None:
        longest, samples = tokens, train.groups_per_step
    else:
        longest = min(tokens, c.data.max_prompt_tokens + c.rollout.longest_answer)
        samples = train.groups_per_step * train.samples_per_group // train.steps_per_rollout
    of_rank = -(-samples // c.parallel.dp)
    micro = -(-of_rank // max(1, tokens // longest))
    return StepShape(tokens=tokens, micro_batches=max(1, -(-micro // packs)) * packs, longest=longest)


@dataclass(frozen=True, slots=True)
class _Kind:
    """GPUs with the same processes."""

    processes: tuple[Process, ...]
    gpus: int


class _Composer:
    def __init__(self, config: RunConfig, hf: HFConfig, on: Device, imbalance: float) -> None:
        self.config, self.hf, self.device, self.imbalance = config, hf, on, imbalance
        self.gpus = config.cluster.gpus_per_node > 0
        self.placement: PlacementPlan = plan_placement(config.cluster, config.parallel, config.servers)
        self.ranks = dict(self._ranks())
        self.engine = self._engine()

    def plan(self, disk: DiskPlan | None) -> Plan:
        stages = [self._row(kind) for kind in self._kinds()]
        return Plan(
            device=self.device,
            on_gpus=self.gpus,
            stages=tuple(sorted(stages, key=lambda row: (_ROLES.index(_role(row)), row.stage))),
            engine=self.engine,
            servers=0 if self.config.servers is None else self.config.servers.servers,
            host=self._host(),
            disk=disk,
            imbalance=self.imbalance,
            not_planned=tuple(self._not_planned()),
        )

    def _not_planned(self) -> Iterator[str]:
        """Servers of which no memory is planned."""
        servers = self.config.servers
        if servers is not None and self.engine is None:
            on_gpus = self.gpus and servers.on_gpus
            ranks = servers.embedded.tp_size if servers.engine == "embedded" else servers.gpus_per_server
            each = f" of {ranks} {'GPUs' if on_gpus else 'ranks'} each" if ranks > 1 else ""
            where = "on GPUs" if on_gpus else "on the host"
            yield f"rollout servers ({servers.servers} x {servers.engine}{each}, {where})"
        if servers is not None and (teachers := self.config.distillation.servers):
            yield f"servers of teachers ({teachers})"

    def _ranks(self) -> Iterator[tuple[Role, RankPlans]]:
        trainer = trainer_config(self.config, Path())
        roles: dict[Role, TrainerConfig | None] = {
            "trainer": trainer,
            "critic": critic_config(self.config, trainer),
            "reference": reference_config(self.config, trainer),
        }
        turns = self.config.takes_turns
        for role, own in roles.items():
            if own is not None:
                yield (
                    role,
                    RankPlans(
                        own,
                        self.hf,
                        step_shape(self.config),
                        gpus=self.gpus,
                        sleeps=turns and role != "reference",
                        publishes=role == "trainer" and self.config.servers is not None,
                        imbalance=self.imbalance,
                    ),
                )

    def _engine(self) -> EnginePlan | None:
        servers = self.config.servers
        if servers is None or servers.engine != "sglang" or not self.gpus:
            return None
        routes = self.config.routes_belong_to_their_log_probs
        return engine_plan(servers, self.config.precision, self.hf, self.device, routes=routes)

    # GPUs

    def _slots(self) -> Iterator[tuple[Role, Slot]]:
        for role in _ROLES:
            if role == "rollout" and self.engine is None:
                continue
            slots = self.placement.critics() if role == "critic" else self.placement.of(role)
            yield from ((role, slot) for slot in slots if role == "rollout" or role in self.ranks)

    def _stage(self, role: Role, slot: Slot) -> int:
        return 0 if role == "rollout" else slot.index // (self.config.parallel.world_size // self.config.parallel.pp)

    def _kinds(self) -> list[_Kind]:
        places: defaultdict[object, set[Process]] = defaultdict(set)
        for role, slot in self._slots():
            gpus: list[object] = [(slot.node, gpu) for gpu in slot.gpus]
            for place in gpus or [(role, slot.index)]:
                places[place].add((role, self._stage(role, slot)))
        counted = Counter(tuple(sorted(own, key=lambda p: _ROLES.index(p[0]))) for own in places.values())
        return [_Kind(processes, n) for processes, n in counted.items()]

    def _row(self, kind: _Kind) -> StagePlan:
        role, stage = kind.processes[0]
        phases = {phase: parts for phase in PHASES if (parts := self._phase(kind.processes, phase))}
        weights = self.ranks[role].stages[stage] if role in self.ranks else None
        return StagePlan(
            role=role,
            stage=stage,
            gpus=kind.gpus,
            layers="" if weights is None else _ranges(weights.layers),
            parameters=0 if weights is None else weights.elements(),
            expert_parameters=0 if weights is None else weights.elements("expert"),
            shared_with=tuple(other for other, _ in kind.processes[1:]),
            phases=phases,
        )

    def _phase(self, processes: Sequence[Process], phase: Phase) -> Bytes:
        """What the processes of a GPU hold together: each its static part, and the one that computes its dynamic."""
        uses = [use for process in processes if (use := self._use(process, phase)) is not None]
        if not any(self._has(process, phase) for process in processes):
            return {}
        return added(*(use.static for use in uses), largest(use.dynamic for use in uses))

    def _has(self, process: Process, phase: Phase) -> bool:
        role, stage = process
        if role == "rollout":
            return phase in ("publishing", "generating")
        if phase == "publishing" and self.config.servers is None:
            return False
        return phase in self.ranks[role].uses(stage)

    def _use(self, process: Process, phase: Phase) -> Use | None:
        role, stage = process
        if role != "rollout":
            return self.ranks[role].uses(stage).get(phase)
        assert self.engine is not None
        released, bucket = self.config.takes_turns, self.config.publish.bucket_bytes
        if phase == "generating":
            return Use(static=self.engine.generating(), dynamic={})
        if phase == "publishing":
            whole = added(self.engine.generating(), {"engine runtime": bucket})
            return Use(static=self.engine.publishing(2 * bucket) if released else whole, dynamic={})
        return Use(static=self.engine.asleep(), dynamic={}) if released else None

    # the host

    def _host(self) -> HostPlan:
        by_node: defaultdict[int, list[Mapping[str, int]]] = defaultdict(list)
        servers: Counter[int] = Counter()
        for role, slot in self._slots():
            if role == "rollout":
                servers[slot.node] += len(slot.gpus)
            else:
                by_node[slot.node].append(self._of_rank(role, self._stage(role, slot)))
        if self.engine is not None:
            replicas = self.config.rollout.sglang.dp_size if self.config.rollout.sglang.enable_dp_attention else 1
            family = family_of(self.hf)
            layers = family.num_layers(self.hf) if family.num_experts(self.hf) else 0
            for node, gpus in servers.items():
                held = self.engine.tokens // replicas
                by_node[node].append(engine_host(gpus, held, layers, family.top_k(self.hf)))
        by_node[self.placement.of("trainer")[0].node].append(self._driver())
        node, parts = max(
            ((node, summed(several)) for node, several in sorted(by_node.items())), key=lambda of: sum(of[1].values())
        )
        # a node with more or fewer GPUs than is usual has memory in proportion
        gpus = self.config.cluster.gpus_per_node or self.device.node_gpus
        return HostPlan(node=node, parts=parts, memory=self.device.node_memory * gpus // self.device.node_gpus)

    def _of_rank(self, role: Role, stage: int) -> Mapping[str, int]:
        plans, c = self.ranks[role], self.config
        copies = 0
        if role == "trainer":
            swapped = [t for t in c.distillation.teachers.values() if isinstance(t.part, SwappedWeights)]
            copies = plans.config.reference + len(swapped)
        out = rank_host(
            plans.stages[stage],
            plans.states[stage],
            plans.config,
            sleeps=plans.sleeps and self.gpus,
            copies=copies,
            saves_aside=c.checkpoint.asynchronous and role != "reference",
            published=self._published() if role == "trainer" and c.servers and c.publish.path == "delta" else 0,
        )
        if not self.gpus:
            uses = plans.uses(stage)
            out["ranks"] = max(total(added(use.static, use.dynamic)) for use in uses.values())
        return out

    def _published(self) -> int:
        """A rank's share of the encoded weights."""
        c = self.config
        return -(-published_bytes(c.precision, self.hf) // c.parallel.world_size)

    def _driver(self) -> Mapping[str, int]:
        c, family = self.config, family_of(self.hf)
        if c.servers is None:
            return {"processes": DRIVER}
        routed = len(family.moe_layers(self.hf)) if c.routes_belong_to_their_log_probs else 0
        samples = Samples(
            count=math.ceil(c.train.groups_per_step * c.train.samples_per_group * (1 + c.buffer.slack)),
            tokens=c.data.max_prompt_tokens + c.rollout.longest_answer,
            layers=routed,
            top_k=family.top_k(self.hf),
            experts=family.num_experts(self.hf),
        )
        wide = c.rollout.sglang.tp_size if c.rollout.engine == "sglang" else 1
        held, bucket = c.publish.hold_bytes, c.publish.bucket_bytes
        return driver_host(samples, held=held, bucket=bucket, copies=wide, hashes=c.rollout.engine == "embedded")


def _role(row: StagePlan) -> Role:
    return next(role for role in _ROLES if role == row.role)


def _ranges(chunks: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{c[0]}-{c[-1]}" if len(c) > 1 else str(c[0]) for c in chunks if c)

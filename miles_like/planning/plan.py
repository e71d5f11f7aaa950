"""The plan of a run: bytes that each kind of GPU, a node's memory and its disk must hold, and whether they can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from miles_like.device_table import Device
from miles_like.planning.memory.engine import EnginePlan
from miles_like.planning.memory.parts import PARTS, PHASES, Bytes, Phase, gib, total


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A set of GPUs that hold the same: those of one pipeline stage, or those of servers alone."""

    role: str  # "trainer", "critic", "reference" or "rollout"; colocated processes are in the trainer's row
    stage: int
    gpus: int
    layers: str  # "3-10"; empty for servers
    parameters: int  # elements of one rank
    expert_parameters: int
    shared_with: tuple[str, ...]  # roles of the other processes on these GPUs
    phases: Mapping[Phase, Bytes]

    @property
    def name(self) -> str:
        """`trainer stage 4`, `rollout`."""
        return self.role if self.role == "rollout" else f"{self.role} stage {self.stage}"

    @property
    def worst(self) -> Phase:
        return max(self.phases, key=lambda phase: total(self.phases[phase]))

    @property
    def peak(self) -> int:
        return total(self.phases[self.worst])


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """Host memory of the node that needs most. Page cache, also of staged files, is not counted, because the kernel
    frees it when memory is needed."""

    node: int
    parts: Mapping[str, int]
    memory: int  # of a node

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPlan:
    """Bytes that a run writes, from the start. shared: on the file system of run and cache directory, by stage;
    node: on the local disk of the node with most, by what it is."""

    shared: Mapping[str, int]
    node: Mapping[str, int]
    checkpoint: int  # one of those among `shared`
    node_disk: int  # a node's local disk; 0 where the run has no directory on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run needs. step_s: seconds of a step by part."""

    device: Device
    on_gpus: bool  # False: CPU ranks, whose memory is the host's; such a plan refuses nothing
    stages: tuple[StagePlan, ...]
    engine: EnginePlan | None
    servers: int
    host: HostPlan
    disk: DiskPlan | None  # None: sizes are known only once the model is fetched
    imbalance: float
    not_planned: tuple[str, ...] = ()  # servers whose memory is in none of these figures
    step_s: Mapping[str, float] | None = field(default=None)

    @property
    def worst(self) -> StagePlan:
        """The GPUs with the largest need."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def spare(self) -> float:
        """Share of the fullest GPU that is left; negative where it does not fit."""
        return 1 - self.worst.peak / self.device.memory

    @property
    def fits(self) -> bool:
        return not self.problems()

    def problems(self) -> list[str]:
        """A sentence about each device, node or disk that cannot hold its part."""
        return [*self._of_gpus(), *self._of_engine(), *self._of_host(), *self._of_disk()] if self.on_gpus else []

    def verdict(self) -> str:
        """One sentence."""
        if not self.on_gpus:
            return "CPU ranks: no run is rejected, because the operating system shares the host's memory"
        worst = self.worst
        where = f"{worst.name} while {worst.worst}: {gib(worst.peak)} of {gib(self.device.memory)} GiB"
        if problems := self.problems():
            return "does not fit: " + "; ".join(problems)
        rest = f"; not planned: {', '.join(self.not_planned)}" if self.not_planned else ""
        return (
            f"fits, with {self.spare:.0%} of {with_article(self.device.name)} to spare on the fullest ({where}){rest}"
        )

    def _of_gpus(self) -> list[str]:
        over = [stage for stage in self.stages if stage.peak > self.device.memory]
        if not over:
            return []
        worst = max(over, key=lambda stage: stage.peak)
        more = f" ({len(over)} of {len(self.stages)} kinds of GPUs are too small)" if len(over) > 1 else ""
        return [
            f"{worst.name} needs {gib(worst.peak)} GiB while {worst.worst}, but {with_article(self.device.name)} "
            f"has {gib(self.device.memory)} ({described(worst.phases[worst.worst])}){more}"
        ]

    def _of_engine(self) -> list[str]:
        engine = self.engine
        if engine is None or engine.cache > 0:
            return []
        return [
            f"the weights of a server take {gib(engine.weights)} GiB of each GPU, which leaves no room for a KV cache: "
            f"raise rollout.sglang.mem_fraction_static above {engine.least_fraction:.2f} or rollout.sglang.tp_size"
        ]

    def _of_host(self) -> list[str]:
        if self.host.total <= self.host.memory:
            return []
        parts = ", ".join(f"{name} {gib(n)}" for name, n in self.host.parts.items() if n)
        return [
            f"node {self.host.node} needs {gib(self.host.total)} GiB of host memory, but has "
            f"{gib(self.host.memory)} ({parts})"
        ]

    def _of_disk(self) -> list[str]:
        disk = self.disk
        if disk is None or not disk.node_disk or sum(disk.node.values()) <= disk.node_disk:
            return []
        return [
            f"a node writes {gib(sum(disk.node.values()))} GiB to cluster.stage_dir, but its local disk has "
            f"{gib(disk.node_disk)}"
        ]


def with_article(device: str) -> str:
    """`an H100`, `a B200`: by the sound of the first letter."""
    return f"{'an' if device[0] in 'AEFHILMNORSX' else 'a'} {device}"


def described(parts: Bytes) -> str:
    """`parameters 11.2, gradients 22.3`: parts of at least 0.1 GiB."""
    return ", ".join(f"{part} {gib(parts[part])}" for part in PARTS if parts.get(part, 0) >= 0.05 * (1 << 30))


def phases_of(stage: StagePlan) -> list[Phase]:
    """The phases that these GPUs go through, in order."""
    return [phase for phase in PHASES if phase in stage.phases]

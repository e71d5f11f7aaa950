"""Which ranks of a layout differ: one rank stands for all that hold the same modules with the same shares.

Ranks of one pipeline stage differ in what they hold only by rounding: the first of them (tensor-, context-, data- and
expert-parallel rank 0) stands for the stage. Stages are alike if they have the same kinds of layers, in each of their
virtual stages, and the same modules around them (embedding, head, draft layers); of stages that are alike the one with
the most micro-batches in flight, the earliest, stands for the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_bridge.config import ParallelConfig, TrainerConfig
from megatron_bridge.families.base import HFConfig
from megatron_bridge.families.registry import family_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A pipeline stage. layers: of each virtual stage, whether each of its layers has experts."""

    number: int
    layers: tuple[tuple[bool, ...], ...]
    first: bool
    last: bool

    @property
    def kind(self) -> tuple[tuple[tuple[bool, ...], ...], bool, bool]:
        """Equal for stages that hold the same modules."""
        return self.layers, self.first, self.last


def stages_of(config: TrainerConfig, hf: HFConfig) -> list[Stage]:
    """All pipeline stages of a layout, in order; see `layers_of_stages`."""
    family, parallel = family_of(hf), config.parallel
    sparse, count = set(family.moe_layers(hf)), family.dims(hf)["layers"]
    return [
        Stage(
            number=number,
            layers=tuple(tuple(layer in sparse for layer in chunk) for chunk in chunks),
            first=number == 0,
            last=number == parallel.pp - 1,
        )
        for number, chunks in enumerate(layers_of_stages(parallel, count))
    ]


def layers_of_stages(parallel: ParallelConfig, layers: int) -> list[list[range]]:
    """Stage -> virtual stage -> its layers: megatron's `get_transformer_layer_offset` for stages of equal numbers of
    layers, except for a first and a last one."""
    first, last, pp, vpp = parallel.first_stage_layers, parallel.last_stage_layers, parallel.pp, parallel.vpp
    ends = sum(n is not None for n in (first, last))
    between = (layers - (first or 0) - (last or 0)) // max(pp - ends, 1)
    held = [between] * pp
    if first is not None:
        held[0] = first
    if last is not None:
        held[-1] = last
    out: list[list[range]] = [[] for _ in range(pp)]
    start = 0
    for _ in range(vpp):
        for stage, count in enumerate(held):
            out[stage].append(range(start, start + count // vpp))
            start += count // vpp
    return out


def distinct_stages(config: TrainerConfig, hf: HFConfig) -> list[Stage]:
    """The earliest stage of each kind."""
    kinds: dict[object, Stage] = {}
    for stage in stages_of(config, hf):
        kinds.setdefault(stage.kind, stage)
    return list(kinds.values())


def first_rank(parallel: ParallelConfig, stage: int) -> int:
    """Number of the first rank of a pipeline stage: in megatron's order of ranks the pipeline is outermost."""
    return stage * parallel.tp * parallel.cp * parallel.dp


def micro_batches_in_flight(parallel: ParallelConfig, stage: int) -> int:
    """A number of micro-batches with which a step of this stage reaches its highest memory: one more than a 1F1B
    schedule holds at once, or two rounds of an interleaved one."""
    return parallel.pp - stage + 1 if parallel.vpp == 1 else 2 * parallel.pp

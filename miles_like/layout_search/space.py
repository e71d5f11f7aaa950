"""The layouts that a search ranks: divisions of the trainer's ranks, and of the servers' GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megatron_bridge.config import ParallelConfig
from megatron_bridge.families.base import HFConfig
from megatron_bridge.plan.layout import check_layout
from miles_like.planning.nearby import Change, divisors, stage_ends
from miles_like.timing.layers import Recompute
from miles_like.timing.shape import ModelShape

CONTEXT = (1, 2, 4, 8)
EXPERT_TENSOR = (1, 2)
VIRTUAL = (1, 2, 3, 4, 6)
DEEPEST = 16  # pipeline stages
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOAD = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Layout:
    """One division of the trainer's ranks, with what they recompute and keep on the host."""

    parallel: ParallelConfig
    recompute: Recompute
    offload: float

    def described(self) -> str:
        p = self.parallel
        sizes = f"tp {p.tp}, pp {p.pp}, vpp {p.vpp}, cp {p.cp}, ep {p.ep}, etp {p.etp}, dp {p.dp}"
        return f"{sizes} with recompute = {self.recompute!r} and offload_optimizer = {self.offload:g}"

    def change(self) -> Change:
        """Keys of a configuration and their values."""
        p = self.parallel
        sizes = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "first_stage_layers", "last_stage_layers")
        out: dict[str, object] = {f"parallel.{name}": getattr(p, name) for name in sizes}
        return out | {"train.recompute": self.recompute, "kernels.offload_optimizer": self.offload}


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """One division of the servers' GPUs."""

    count: int
    tp: int
    ep: int
    dp: int
    deepep: bool
    fraction: float

    def change(self) -> Change:
        return {
            "rollout.servers": self.count,
            "rollout.sglang.tp_size": self.tp,
            "rollout.sglang.ep_size": self.ep,
            "rollout.sglang.dp_size": self.dp,
            "rollout.sglang.enable_dp_attention": self.dp > 1,
            "rollout.sglang.moe_a2a_backend": "deepep" if self.deepep else "none",
            "rollout.sglang.mem_fraction_static": self.fraction,
        }


@dataclass(slots=True)
class Refusals:
    """How many layouts were refused, by the sentence of the first one for each reason."""

    counts: Counter[str] = field(default_factory=Counter)
    sentences: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, sentence: str, number: int = 1) -> None:
        self.counts[reason] += number
        self.sentences.setdefault(reason, sentence)


class Divisions:
    """The layouts of one model over a number of ranks. hf: its config.json; width: GPUs of a node.

    Sizes that the model refuses (`check_layout`, size by size) are left out, as are those that `ParallelConfig` does.
    """

    def __init__(self, hf: HFConfig, shape: ModelShape, width: int, refusals: Refusals) -> None:
        self.hf, self.shape, self.width, self.refusals = hf, shape, width, refusals
        self._checked: dict[tuple[tuple[str, int], ...], bool] = {}

    def of(self, ranks: int) -> Iterator[ParallelConfig]:
        """Every division of `ranks` that the checks accept."""
        experts = self.shape.experts or 1
        for tp in divisors(ranks, self.width):
            if self.width % tp or not self._fits(tp=tp):
                continue
            for cp in (c for c in CONTEXT if ranks % (tp * c) == 0):
                for pp in divisors(ranks // (tp * cp), min(DEEPEST, self.shape.layers)):
                    dp = ranks // (tp * cp * pp)
                    for vpp, first, last in self._stages(pp):
                        for ep, etp in self._experts(tp * cp * dp, tp, experts):
                            yield ParallelConfig.model_construct(
                                tp=tp,
                                pp=pp,
                                vpp=vpp,
                                cp=cp,
                                ep=ep,
                                etp=etp,
                                dp=dp,
                                first_stage_layers=first,
                                last_stage_layers=last,
                                sequence_parallel=True,
                            )

    def _stages(self, pp: int) -> Iterator[tuple[int, int | None, int | None]]:
        first, last = stage_ends(self.shape.layers, pp)
        for vpp in VIRTUAL if pp > 1 else (1,):
            sizes = {"pp": pp, "vpp": vpp} | ({"first_stage_layers": first} if first is not None else {})
            if self._fits(**sizes, **({"last_stage_layers": last} if last is not None else {})):
                yield vpp, first, last

    def _experts(self, ranks: int, tp: int, experts: int) -> Iterator[tuple[int, int]]:
        for etp in (e for e in EXPERT_TENSOR if e <= tp and (experts > 1 or e == 1)):
            for ep in divisors(experts, ranks):
                if ranks % (ep * etp) == 0 and self._fits(ep=ep, etp=etp, dp=ep * etp):
                    yield ep, etp

    def _fits(self, **sizes: int) -> bool:
        """Whether the model can be divided so, whatever the other sizes are."""
        key = tuple(sorted(sizes.items()))
        if key not in self._checked:
            try:
                check_layout(ParallelConfig.model_validate(sizes), self.hf)
                self._checked[key] = True
            except ValueError as e:
                self._checked[key] = False
                self.refusals.add("the model's sizes", str(e))
        return self._checked[key]


def servers_of(shape: ModelShape, gpus: int, width: int, fractions: tuple[float, ...], tp: int) -> Iterator[Servers]:
    """Divisions of `gpus` into equal servers on whole nodes or parts of one; with experts also over expert-parallel
    ranks, with latent attention also with data-parallel attention. tp: the configuration's, which is always among the
    sizes."""
    sizes = sorted({n for n in divisors(gpus, gpus) if n & (n - 1) == 0} | ({tp} if gpus % tp == 0 else set()))
    for size in sizes:
        if (size > width and size % width) or (size < width and width % size):
            continue
        for ep in {1, size} if shape.is_moe else {1}:
            for dp in {1, size} if shape.kv_heads == 1 else {1}:
                for deepep in {False, ep == dp == size and size > 1}:
                    for fraction in fractions:
                        yield Servers(count=gpus // size, tp=size, ep=ep, dp=dp, deepep=deepep, fraction=fraction)


def merged(*changes: Mapping[str, object]) -> dict[str, object]:
    """One change with the keys of all given ones."""
    return {key: value for change in changes for key, value in change.items()}

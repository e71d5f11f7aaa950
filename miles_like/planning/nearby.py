"""Configurations near one that does not fit, on the same GPUs, that do: few keys changed, and those only a little.

Every candidate is a `RunConfig` that its validators accept and whose model, kernels and servers fit the layout, so that
nothing is proposed that the run would refuse for another reason.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megatron_bridge.config import ParallelConfig
from miles_like.config.run import RunConfig
from miles_like.planning.memory.parts import gib
from miles_like.planning.plan import Plan

FOUND = 3  # proposals
TRIED = 120  # plans at most: a tenth of a second each
_LAYOUTS = 24  # nearest layouts that are tried
_FRACTIONS = (0.05, 0.1, 0.15, 0.2, 0.3)  # steps of mem_fraction_static
_SHARES = (0.75, 0.5, 0.25, 0.0)  # of the optimizer on the host
Change = Mapping[str, object]  # section.key -> value


@dataclass(frozen=True, slots=True)
class Model:
    """What restricts the layouts of a model."""

    layers: int
    experts: int  # of a layer; 0: none


@dataclass(frozen=True, slots=True)
class Alternative:
    """Keys to change, and the plan with them."""

    change: Change
    plan: Plan

    def described(self) -> str:
        """`kernels.offload_optimizer = 1.0 (62.3 GiB, 22% to spare)`."""
        keys = ", ".join(f"{k} = {v}" if v is not None else f"no {k}" for k, v in self.change.items())
        return f"{keys} ({gib(self.plan.worst.peak)} GiB, {self.plan.spare:.0%} to spare)"


def nearest(config: RunConfig, plan: Plan, model: Model, plan_of: Callable[[RunConfig], Plan]) -> list[Alternative]:
    """At most `FOUND` alternatives that fit, nearest first. plan: of `config`. plan_of: raises
    ValueError for a configuration that cannot run."""
    found: list[Alternative] = []
    for change in itertools.islice(_changes(config, plan, model), TRIED):
        try:
            other = plan_of(changed(config, change))
        except ValueError:
            continue
        if other.fits:
            found.append(Alternative(change, other))
            if len(found) == FOUND:
                break
    return found


def refusal(plan: Plan, found: Sequence[Alternative]) -> str:
    """One sentence: why the plan does not fit, and what near it does."""
    near = "; ".join(other.described() for other in found)
    remedy = f"the most similar layouts that fit: {near}" if found else "no similar layout fits: use more nodes"
    return f"the run {plan.verdict()}; {remedy}; --force starts it anyway"


def changed(config: RunConfig, change: Change) -> RunConfig:
    """The configuration with other values; None removes a key. Raises ValueError as its validators do."""
    tree: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
    for key, value in change.items():
        *path, last = key.split(".")
        section = tree
        for name in path:
            section = section.setdefault(name, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as e:
        raise ValueError("; ".join(_sentence(error["loc"], error["msg"]) for error in e.errors())) from None


def _sentence(where: Sequence[int | str], message: str) -> str:
    key, text = ".".join(map(str, where)), message.removeprefix("Value error, ")
    return f"{key}: {text}" if key and key not in text else text


def _changes(config: RunConfig, plan: Plan, model: Model) -> Iterator[Change]:
    """Candidates by the number of things that they change, then by distance."""
    over = {phase for row in plan.stages for phase, parts in row.phases.items() if _over(parts, plan)}
    engine: list[Change] = []
    if plan.engine is not None and ("generating" in over or plan.engine.cache <= 0):
        engine = list(_fractions(config, plan))
    trainer: list[Change] = []
    if over - {"generating"} or not over:
        trainer = list(_settings(config, plan))
    layouts = list(itertools.islice(_layouts(config, model), _LAYOUTS))
    pools = [p for p in (engine, trainer, layouts) if p]
    for size in range(1, len(pools) + 1):
        for chosen in itertools.combinations(pools, size):
            for changes in itertools.product(*chosen):
                yield {key: value for one in changes for key, value in one.items()}


def _over(parts: Mapping[Any, int], plan: Plan) -> bool:
    return sum(parts.values()) > plan.device.memory


def _fractions(config: RunConfig, plan: Plan) -> Iterator[Change]:
    assert plan.engine is not None
    now, least = config.rollout.sglang.mem_fraction_static, plan.engine.least_fraction
    for step in _FRACTIONS:
        for value in (now - step, now + step) if plan.engine.cache <= 0 else (now - step,):
            if least < value < 1:
                yield {"rollout.sglang.mem_fraction_static": round(value, 3)}


def _settings(config: RunConfig, plan: Plan) -> Iterator[Change]:
    """Of the optimizer and of recomputation, the mildest first. Where the host has too little memory, and the devices
    have enough, less of the optimizer on the host is all that helps."""
    now = config.kernels.offload_optimizer
    if plan.host.total > plan.host.memory and plan.worst.peak <= plan.device.memory:
        yield from ({"kernels.offload_optimizer": share} for share in _SHARES if share < now)
        return
    more: list[Change] = []
    if config.train.recompute != "full":
        named: Change = {"train.recompute_modules": []} if config.train.recompute_modules else {}
        more.append({"train.recompute": "full", **named})
    if config.kernels.offload_optimizer < 1:
        more.append({"kernels.offload_optimizer": 1.0})
    yield from more
    if len(more) == 2:
        yield {**more[0], **more[1]}


def _layouts(config: RunConfig, model: Model) -> Iterator[Change]:
    """Other divisions of the same ranks, the nearest first: sizes by their ratio to the present ones."""
    now, width = config.parallel, config.cluster.gpus_per_node or config.parallel.world_size
    options: list[tuple[float, str, Change]] = []
    ranks, layers, experts = now.world_size // now.cp, model.layers, model.experts
    for tp in divisors(ranks, width):
        for pp in divisors(ranks // tp, layers):
            dp = ranks // tp // pp
            for ep in divisors(tp * now.cp * dp, experts or 1):
                sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep}
                if all(getattr(now, name) == size for name, size in sizes.items()):
                    continue
                distance = sum(abs(math.log2(size / getattr(now, name))) for name, size in sizes.items())
                options.append((distance, repr(sizes), _layout(now, sizes, layers)))
    yield from (change for _, _, change in sorted(options, key=lambda o: o[:2]))


def _layout(now: ParallelConfig, sizes: Mapping[str, int], layers: int) -> Change:
    wanted: dict[str, object] = {**sizes, "first_stage_layers": now.first_stage_layers}
    wanted["last_stage_layers"] = now.last_stage_layers
    if sizes["pp"] != now.pp:
        wanted["first_stage_layers"], wanted["last_stage_layers"] = stage_ends(layers, sizes["pp"])
    if sizes["pp"] == 1:
        wanted["vpp"] = 1
    return {f"parallel.{name}": value for name, value in wanted.items() if getattr(now, name) != value}


def stage_ends(layers: int, stages: int) -> tuple[int | None, int | None]:
    """Layers of the first and the last stage so that the stages between have equal numbers: None where all have. The
    ends, which also hold the embedding and the head, get at most as many as the others where that is possible."""
    if layers % stages == 0 or stages == 1:
        return None, None
    if stages == 2:
        return -(-layers // 2), layers // 2
    between = -(-layers // stages)
    ends = layers - between * (stages - 2)
    while ends < 2:
        between -= 1
        ends = layers - between * (stages - 2)
    return -(-ends // 2), ends // 2


def divisors(number: int, most: int) -> list[int]:
    """Divisors of `number` up to `most`, ascending."""
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]

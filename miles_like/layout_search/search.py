"""Ranks layouts of a run by predicted step time, and keeps those that the run's own checks and memory plan accept.

Cheap arithmetic comes first: every division of the ranks that the model's sizes allow gets its training time, every
division of the servers its rollout time, and their best combinations are tried in order. What is reported is a
`RunConfig` that its validators accept, whose model, kernels, servers and placement fit, and whose memory plan fits.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_bridge.families.base import HFConfig
from miles_like.config.ranks import trainer_config
from miles_like.config.run import RunConfig
from miles_like.config.sections.cluster import POOLS
from miles_like.layout_search.estimate import Floor
from miles_like.layout_search.space import (
    OFFLOAD,
    RECOMPUTE,
    Divisions,
    Layout,
    Refusals,
    Servers,
    merged,
    servers_of,
)
from miles_like.planning.compose import step_shape
from miles_like.planning.memory.engine import engine_plan
from miles_like.planning.memory.parts import gib, total
from miles_like.planning.memory.ranks import RankPlans
from miles_like.planning.nearby import Change, changed
from miles_like.planning.plan import Plan
from miles_like.timing.engine import EngineSetup
from miles_like.timing.layers import Recompute
from miles_like.timing.of_run import NOWHERE, Facts, engine_setup, layer_setup, step_setup
from miles_like.timing.publish import Path as Route
from miles_like.timing.publish import publish_time
from miles_like.timing.rates.calibration import REACHED
from miles_like.timing.rollout import rollout_time, steady_rollout_time
from miles_like.timing.shape import ModelShape, model_shape
from miles_like.timing.step import Overlap, StepSetup, StepTime, overlap_of, step_time
from miles_like.timing.train import Memo, TrainSetup, passes_time, sleep_time, train_time
from quant.spec import FOUR_BIT, QuantFormat

KEPT = 8  # layouts that are reported
SPARE = 0.08  # of the fullest GPU that a layout leaves: the arithmetic is not exact, and allocators are not perfect
PATHS: tuple[Route, ...] = ("tensor", "distributed", "disk")  # of publications to stock servers
TRIED = 160  # plans at most
TRAINERS, ENGINES = 24, 16  # of the fastest that fit by themselves, whose combinations are tried
RANKS = 500  # trainers whose memory is computed at most
Order = Literal["speed", "cost"]
SPLITS = (0.25, 0.5, 0.75)  # share of the nodes that separate servers have


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One layout that runs: the fastest of those with its tensor-, pipeline- and expert-parallel sizes and servers."""

    change: Change
    config: RunConfig
    plan: Plan
    time: StepTime

    @property
    def gpu_hours(self) -> float:
        """Of 10^9 trained tokens."""
        return self.time.gpus * 1e9 / self.time.tokens_per_s / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """`found`: the best first. considered: divisions of trainer ranks and of servers that were timed."""

    found: tuple[Found, ...]
    considered: int
    planned: int
    refusals: Refusals


@dataclass(frozen=True, slots=True)
class _Timed:
    """A trainer's layout or a division of servers, with the seconds that it takes."""

    seconds: float
    turns: float
    change: Change
    key: tuple[object, ...]
    layout: Layout | None = None


def search(
    run: RunConfig,
    hf: HFConfig,
    facts: Facts,
    plan_of: Callable[[RunConfig], Plan],
    *,
    nodes: Sequence[int] = (),
    kept: int = KEPT,
    formats: Sequence[QuantFormat] = (),
    by: Order = "speed",
) -> Searched:
    """The layouts of `run` on each number of `nodes` of facts.device (empty: the configuration's), in its format or in
    each of `formats`; the fastest first, or the ones with the fewest GPU-hours a token.

    hf: config.json of the served checkpoint. plan_of: the memory plan; raises ValueError for a configuration that the
    run refuses. Raises ValueError for a run without GPUs or without a rollout by stock SGLang.
    """
    if not run.cluster.gpus_per_node or run.servers is None or run.rollout.engine != "sglang":
        raise ValueError(
            "the layout search supports runs on GPUs with a rollout by stock SGLang: set cluster.gpus_per_node "
            "and rollout.engine = 'sglang'"
        )
    if pools := [name for name in POOLS if run.cluster.pools.of(name) is not None]:
        raise ValueError(
            f"cluster.pools.{pools[0]} assigns GPUs of certain nodes to a role, but the search divides all GPUs: "
            "remove cluster.pools"
        )
    searches, refusals = [], Refusals()
    changes = [in_format(run, f) for f in dict.fromkeys(formats)] or [{}]
    for number, change in itertools.product(dict.fromkeys(nodes or [run.cluster.nodes]), changes):
        one = _Search(run, hf, facts, plan_of, number, kept, change, refusals)
        searches.append((one, one.run()))
    found = [f for _, several in searches for f in several]
    found.sort(key=lambda f: (f.gpu_hours, f.time.seconds) if by == "cost" else (f.time.seconds, f.gpu_hours))
    return Searched(
        found=tuple(found[:kept]),
        considered=sum(s.considered for s, _ in searches),
        planned=sum(s.planned for s, _ in searches),
        refusals=refusals,
    )


def in_format(run: RunConfig, format: QuantFormat) -> Change:
    """The precision section with another storage format of the rollout's weights; 4-bit formats are trained with the
    rounded weights."""
    own = run.precision
    if format is own.format:
        return {}
    change: dict[str, object] = {"precision.format": format.value}
    if format is QuantFormat.BF16:
        change |= {"precision.qat": False, "precision.activations": "none"}
    elif format in FOUR_BIT:
        change |= {"precision.qat": True, "precision.activations": "none"}
    return change | {f"precision.{key}": None for key in ("scope", "block", "convention") if getattr(own, key)}


class _Search:
    def __init__(
        self,
        run: RunConfig,
        hf: HFConfig,
        facts: Facts,
        plan_of: Callable[[RunConfig], Plan],
        nodes: int,
        kept: int,
        change: Change,
        refusals: Refusals,
    ) -> None:
        run = changed(run, change) if change else run
        self.change, self.refusals = change, refusals
        self.config, self.hf, self.facts, self.plan_of, self.nodes, self.kept = run, hf, facts, plan_of, nodes, kept
        self.shape: ModelShape = model_shape(hf)
        self.base: StepSetup = step_setup(run, hf, facts)
        same = facts.device.name == run.cluster.device  # other devices come in nodes of their usual size
        self.width = run.cluster.gpus_per_node if same else facts.device.node_gpus
        self.memo, self.considered, self.planned = Memo(), 0, 0
        self.divisions = Divisions(hf, self.shape, self.width, self.refusals)
        self.floor = Floor(
            shape=self.shape,
            device=facts.device,
            tokens=run.train.max_tokens_per_rank,
            rounded=2.0 * run.precision.qat,
            rows=self.base.load.tokens / run.train.steps_per_rollout,
        )
        self.reached = 1 / REACHED[facts.device.name]

    def run(self) -> list[Found]:
        found: list[Found] = []
        seen: set[tuple[object, ...]] = set()
        for change, key in self._ordered():
            if len(found) == self.kept or self.planned == TRIED:
                break
            if key in seen:
                continue
            if (one := self._tried(change)) is not None:
                seen.add(key)
                found.append(one)
        return found

    def _tried(self, change: Change) -> Found | None:
        """The configuration with the change, if the run accepts it and it fits."""
        self.planned += 1
        try:
            config = changed(self.config, change)
            plan = self.plan_of(config)
        except ValueError as e:
            self.refusals.add("the run's checks", str(e))
            return None
        if not plan.fits:
            self.refusals.add("the memory plan", plan.verdict())
            return None
        if plan.spare < SPARE:
            self.refusals.add(f"less than {SPARE:.0%} to spare", f"{plan.verdict()}; the search requires {SPARE:.0%}")
            return None
        tokens = float(plan.engine.tokens) if plan.engine is not None else self.facts.cache_tokens
        setup = step_setup(config, self.hf, replace(self.facts, cache_tokens=tokens))
        return Found(change=change, config=config, plan=plan, time=step_time(self.shape, setup))

    def _ordered(self) -> Iterator[tuple[Change, tuple[object, ...]]]:
        """Combinations by predicted seconds of a step."""
        gpus = self.nodes * self.width
        pools: list[tuple[bool, int, int]] = [(True, gpus, gpus)]
        for share in SPLITS:
            apart = round(share * self.nodes) * self.width
            if 0 < apart < gpus:
                pools.append((False, gpus - apart, apart))
        combined: list[tuple[float, int, Change, tuple[object, ...]]] = []
        for colocated, ranks, served in pools:
            overlap = overlap_of(replace(self.base, colocated=colocated))
            trainers = list(itertools.islice(self._fitting(ranks, colocated), TRAINERS))
            engines = heapq.nsmallest(
                ENGINES, self._engines(served, ranks, overlap, colocated), key=lambda t: t.seconds
            )
            pool = merged(self.change, self._pool(colocated))
            for trainer in trainers:
                for engine in engines:
                    seconds = _step(trainer, engine, overlap)
                    change = self._written(merged(pool, trainer.change, engine.change))
                    combined.append((seconds, len(combined), change, (*trainer.key, *engine.key, colocated)))
        combined.sort(key=lambda c: c[:2])
        yield from ((change, key) for _, _, change, key in combined)

    def _written(self, change: Change) -> Change:
        """The change without removals of keys that are not there; where stages are equal, and the configuration has
        other ends, with these keys' values, so that a file that extends it can say so."""
        tree, layers, out = self.config.model_dump(exclude_none=True), self.shape.layers, dict(change)
        for key in [key for key, value in change.items() if value is None]:
            section, name = key.split(".")
            if name not in tree.get(section, {}):
                del out[key]
            elif name.endswith("_stage_layers") and isinstance(pp := change["parallel.pp"], int) and pp > 1:
                out[key] = layers // pp
        return out

    def _pool(self, colocated: bool) -> Change:
        cluster = {"nodes": self.nodes, "gpus_per_node": self.width, "colocate": colocated}
        return {f"cluster.{name}": value for name, value in cluster.items()} | {
            "cluster.device": self.facts.device.name
        }

    def _fitting(self, ranks: int, colocated: bool) -> Iterator[_Timed]:
        """The trainers whose ranks fit on their devices, the fastest first."""
        several = sorted(self._trainers(ranks, colocated), key=lambda t: t.seconds + t.turns)
        for timed in several[:RANKS]:
            assert timed.layout is not None
            if self._fits(timed.layout, colocated):
                yield timed

    def _fits(self, layout: Layout, colocated: bool) -> bool:
        """Whether every stage leaves `SPARE` of its devices while it is built and trained, without servers there."""
        update = {"recompute": layout.recompute, "recompute_modules": ()}
        run = self.config.model_copy(
            update={"parallel": layout.parallel, "train": self.config.train.model_copy(update=update)}
        )
        kernels = run.kernels.model_copy(update={"offload_optimizer": layout.offload})
        trainer = trainer_config(run.model_copy(update={"kernels": kernels}), NOWHERE)
        try:
            plans = RankPlans(
                trainer,
                self.hf,
                step_shape(run),
                gpus=True,
                sleeps=colocated,
                publishes=True,
                imbalance=self.facts.imbalance,
            )
        except ValueError as e:
            self.refusals.add("the trainer's checks", str(e))
            return False
        uses = [use for stage in range(layout.parallel.pp) for use in plans.uses(stage).values()]
        most = max(total(use.static) + total(use.dynamic) for use in uses)
        if most > (1 - SPARE) * self.facts.device.memory:
            self.refusals.add("the memory of a trainer rank", f"{layout.described()} needs {gib(most)} GiB")
            return False
        return True

    def _trainers(self, ranks: int, colocated: bool) -> Iterator[_Timed]:
        settings = self._settings()
        for parallel in self.divisions.of(ranks):
            for recompute in RECOMPUTE:
                for offload in OFFLOAD:
                    layout = Layout(parallel, recompute, offload)
                    setup = self._train(layout, settings[recompute])
                    self.considered += 1
                    if not self.floor.fits(layout, setup, self.memo):
                        sentence = _too_much(self.floor, layout, setup, self.memo)
                        self.refusals.add("the least that a rank holds", sentence)
                        continue
                    yield self._timed(layout, setup, colocated)

    def _settings(self) -> dict[Recompute, TrainSetup]:
        """The trainer's setup by what is recomputed."""
        trainer = trainer_config(self.config, NOWHERE)
        out: dict[Recompute, TrainSetup] = {}
        for recompute in RECOMPUTE:
            update = {"recompute": recompute, "recompute_modules": ()}
            layer = layer_setup(trainer.model_copy(update=update), self.hf, self.facts)
            out[recompute] = replace(self.base.train, layer=layer)
        return out

    def _train(self, layout: Layout, setup: TrainSetup) -> TrainSetup:
        p = layout.parallel
        tokens = self.config.train.max_tokens_per_rank * p.cp
        return replace(setup, layer=replace(setup.layer, parallel=p), pack_tokens=tokens, offload=layout.offload)

    def _timed(self, layout: Layout, setup: TrainSetup, colocated: bool) -> _Timed:
        load = self.base.load
        seconds = train_time(self.shape, setup, load, self.memo).seconds
        seconds += passes_time(self.shape, setup, load, self.memo).seconds
        turns = sleep_time(self.shape, setup, memo=self.memo).seconds if colocated else 0.0
        change = dict(layout.change())
        if layout.parallel.ep * layout.parallel.etp == 1 and self.config.kernels.dispatcher == "flex":
            change["kernels.dispatcher"] = "alltoall"
        p = layout.parallel
        return _Timed(self.reached * seconds, turns, change, (p.tp, p.pp, p.ep, p.etp), layout)

    def _engines(self, gpus: int, ranks: int, overlap: Overlap, colocated: bool) -> Iterator[_Timed]:
        flags = self.config.rollout.sglang
        fractions = tuple(sorted({flags.mem_fraction_static, 0.85}))
        for servers in servers_of(self.shape, gpus, self.width, fractions, flags.tp_size):
            self.considered += 1
            if (engine := self._engine(servers)) is not None:
                seconds = self.reached * self._rollout(engine, overlap)
                publish = replace(self.base.publish, engine=engine, ranks=ranks, colocated=colocated)
                paths = [p for p in PATHS if not (colocated and p == "distributed")]  # as PublishConfig refuses
                published, path = min((publish_time(self.shape, replace(publish, path=p)).seconds, p) for p in paths)
                change = merged(servers.change(), {"publish.path": path})
                yield _Timed(seconds, published, change, (servers.tp,))

    def _rollout(self, engine: EngineSetup, overlap: Overlap) -> float:
        base = self.base
        if overlap == "none" or base.rounds:
            return rollout_time(self.shape, engine, base.load).seconds
        ahead = base.staleness if base.ahead is None else base.ahead
        return steady_rollout_time(self.shape, engine, base.load, ahead=ahead, staleness=base.staleness).seconds

    def _engine(self, servers: Servers) -> EngineSetup | None:
        """The servers with the cache that their memory holds; None where their weights leave none."""
        keys = {name.removeprefix("rollout.sglang."): value for name, value in servers.change().items()}
        keys.pop("rollout.servers")
        rollout = self.config.rollout
        flags = rollout.sglang.model_copy(update=keys)
        plan = engine_plan(
            rollout.model_copy(update={"sglang": flags}),
            self.config.precision,
            self.hf,
            self.facts.device,
            routes=self.config.routes_belong_to_their_log_probs,
        )
        if plan.cache <= 0:
            self.refusals.add(
                "servers without a cache",
                f"servers with rollout.sglang.tp_size = {servers.tp} leave no room for a KV cache at "
                f"mem_fraction_static = {servers.fraction}",
            )
            return None
        engine = engine_setup(self.config, self.hf, self.facts)
        return replace(
            engine,
            servers=servers.count,
            tp=servers.tp,
            ep=servers.ep,
            dp=servers.dp,
            deepep=servers.deepep,
            cache_tokens=float(plan.tokens),
        )


def _step(trainer: _Timed, engine: _Timed, overlap: Overlap) -> float:
    """Seconds of a step of both; an engine's `turns` are its publication."""
    if overlap == "beside":
        return max(trainer.seconds, engine.seconds) + engine.turns
    return trainer.seconds + trainer.turns + engine.seconds + engine.turns


def _too_much(floor: Floor, layout: Layout, setup: TrainSetup, memo: Memo) -> str:
    return f"{layout.described()} holds at least {gib(floor.nbytes(layout, setup, memo))} GiB"

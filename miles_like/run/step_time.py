"""The parts of `miles-like plan` that predict time: of a step, and of other layouts."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from miles_like.config.run import RunConfig
from miles_like.device_table import Device
from miles_like.layout_search.report import chosen_toml, print_search, search_json
from miles_like.layout_search.search import Order, Searched, search
from miles_like.planning.memory.weights import trained_share
from miles_like.planning.plan import Plan
from miles_like.run import assemble
from miles_like.run.setup.model_plan import PlannedModel, planned_model
from miles_like.timing.of_run import Facts, step_setup
from miles_like.timing.shape import model_shape
from miles_like.timing.step import StepSetup, StepTime, step_time
from miles_like.timing.workload import Lengths, lengths_with_mean
from quant.spec import QuantFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command's options about a run's data; None: a share of the configuration's limits (`Facts`)."""

    prompt: float | None
    response: float | None
    reward_s: float

    def facts(self, run: RunConfig, device: Device, imbalance: float) -> Facts:
        """Raises ValueError for a mean response above the longest."""
        responses: Lengths | None = None
        if self.response is not None:
            responses = lengths_with_mean(self.response, run.rollout.longest_answer)
        return Facts(
            device=device, prompt=self.prompt, responses=responses, reward_s=self.reward_s, imbalance=imbalance
        )


def predicted(run: RunConfig, model: PlannedModel, plan: Plan, asked: Asked) -> tuple[StepSetup, StepTime] | None:
    """The time of a step; None for CPU ranks, and for a run without a rollout by stock SGLang."""
    if not plan.on_gpus or run.servers is None or plan.engine is None:
        return None
    facts = replace(
        asked.facts(run, plan.device, plan.imbalance),
        cache_tokens=float(plan.engine.tokens),
        trained=trained_share(model.trainer, model.hf),
    )
    setup = replace(step_setup(run, model.hf, facts), gpus=sum(row.gpus for row in plan.stages))
    return setup, step_time(model_shape(model.hf), setup)


def not_timed(run: RunConfig, model: PlannedModel, plan: Plan) -> str | None:
    """The work that the time of a step does not include, as one line; None: it includes all."""
    if not plan.on_gpus:
        return None
    if run.servers is None or plan.engine is None:
        what = f"rollout.engine = {run.rollout.engine!r}" if run.servers else f"algorithm.name = {run.algorithm.name!r}"
        return f"no step time: the prediction supports rollouts by stock SGLang only, but this run has {what}"
    parts = {
        "the critic's passes and steps": model.critic is not None,
        "the pass of the reference on its own devices": model.reference is not None,
        "the passes of teachers": bool(run.distillation.teachers),
    }
    missing = [part for part, there in parts.items() if there]
    return f"not included in these seconds: {', '.join(missing)}" if missing else None


def searched(
    run: RunConfig, model: PlannedModel, facts: Facts, *, nodes: str | None, formats: str | None, by: str | None
) -> Searched:
    """The layouts of the run; nodes, formats: several are separated by commas. Raises ValueError for an unknown format
    or order and for nodes that are no number, and as `search`."""

    def plan_of(other: RunConfig) -> Plan:
        planned = planned_model(other, model.hf, Path())
        return assemble.memory_plan(other, planned, on=facts.device, imbalance=facts.imbalance)

    known = {f.value: f for f in QuantFormat}
    names = formats.split(",") if formats else []
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"--formats {formats}: {wrong[0]!r} is not one of {', '.join(known)}")
    facts = replace(facts, trained=trained_share(model.trainer, model.hf))
    order = by or "speed"
    if order not in _ORDERS:
        raise ValueError(f"--by {by}: expected one of {', '.join(_ORDERS)}")
    return search(
        run, model.hf, facts, plan_of, nodes=_numbers(nodes), formats=[known[n] for n in names], by=_ORDERS[order]
    )


_ORDERS: dict[str, Order] = {"speed": "speed", "cost": "cost"}


def _numbers(nodes: str | None) -> list[int]:
    """Of nodes, separated by commas."""
    texts = nodes.split(",") if nodes else []
    if wrong := [text for text in texts if not text.isdecimal() or int(text) < 1]:
        raise ValueError(f"--nodes {nodes}: {wrong[0]!r} is not a number of nodes: use for example 8,16")
    return [int(text) for text in texts]


def report(console: Console, found: Searched, path: Path, *, json_path: Path | None, write: Path | None) -> None:
    """The table, the JSON, and the best layout as a configuration that extends `path`. Raises ValueError where there
    is none to write."""
    print_search(console, found)
    if json_path is not None:
        json_path.write_text(json.dumps(search_json(found), indent=2) + "\n", encoding="utf-8")
    if write is None:
        return
    if not found.found:
        raise ValueError(f"--write {write}: no layout fits, so nothing was written: use more nodes")
    write.write_text(chosen_toml(found.found[0], path, write), encoding="utf-8")
    console.print(f"-> {write}", markup=False, highlight=False)

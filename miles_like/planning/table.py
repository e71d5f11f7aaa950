"""A plan for people, as a table, and for programs, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from miles_like.planning.memory.allowances import ALLOWANCES
from miles_like.planning.memory.parts import GIB, MIB, PARTS, PHASES, Bytes, Part, gib, total
from miles_like.planning.plan import Plan, StagePlan, phases_of, with_article

_DIGITS = 3  # of GiB in the JSON


@dataclass(frozen=True, slots=True)
class _Unit:
    """The unit of a plan's tables, and the bytes below which a part is left out of them."""

    name: str
    nbytes: int

    def text(self, nbytes: float) -> str:
        return f"{nbytes / self.nbytes:,.1f}"

    def shown(self, several: Iterable[Bytes]) -> list[Part]:
        """Parts of at least 0.05 units somewhere."""
        found = {part for parts in several for part, n in parts.items() if n >= self.nbytes // 20}
        return [part for part in PARTS if part in found]

    def cells(self, parts: Bytes, shown: Iterable[Part]) -> list[str]:
        return [self.text(parts[part]) if parts.get(part) else "" for part in shown]


def _unit(plan: Plan) -> _Unit:
    """Runs without GPUs are of tiny models."""
    return _Unit("GiB", GIB) if plan.on_gpus else _Unit("MiB", MIB)


def print_plan(console: Console, plan: Plan) -> None:
    """The tables of GPUs, then servers, host and disk, the allowances, and the verdict."""
    for table in (_by_phase(plan), _by_part(plan), _fullest(plan)):
        console.print(table)
    for line in lines_of(plan):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    style = "bold" if plan.fits else "bold red"
    console.print(f"[{style}]{escape(plan.verdict())}[/]", highlight=False, soft_wrap=True)


def _by_phase(plan: Plan) -> Table:
    """The sums of every stage."""
    what = (
        f"of {with_article(plan.device.name)} with {gib(plan.device.memory)}"
        if plan.on_gpus
        else "of host memory a rank"
    )
    table = _table(f"{_unit(plan).name} {what}, by pipeline stage and phase", "processes", "layers", "parameters")
    phases = [phase for phase in PHASES if any(phase in row.phases for row in plan.stages)]
    for phase in phases:
        table.add_column(phase, justify="right")
    for row in plan.stages:
        sums = [_sum(plan, row.phases[phase]) if phase in row.phases else "" for phase in phases]
        size = _count(row.parameters) if row.parameters else ""
        table.add_row(_processes(row, plan.on_gpus), row.layers, size, *sums)
    return table


def _by_part(plan: Plan) -> Table:
    """Every stage while it trains; GPUs of servers alone while they generate."""
    used = {row.name: row.phases.get("training", row.phases.get("generating", {})) for row in plan.stages}
    unit = _unit(plan)
    where = "training, or generating on GPUs of servers alone" if plan.on_gpus else "training"
    table = _table(f"{unit.name} while {where}, by part", "processes")
    shown = unit.shown(used.values())
    for part in shown:
        table.add_column(part, justify="right")
    table.add_column("sum", justify="right")
    for name, parts in used.items():
        table.add_row(name, *unit.cells(parts, shown), _sum(plan, parts))
    return table


def _fullest(plan: Plan) -> Table:
    """All phases of the fullest GPU."""
    row, unit = plan.worst, _unit(plan)
    table = _table(f"{unit.name} of {row.name}, by part and phase", "part")
    phases = phases_of(row)
    for phase in phases:
        table.add_column(phase, justify="right")
    for part in unit.shown(row.phases.values()):
        table.add_row(part, *(unit.cells(row.phases[phase], [part])[0] for phase in phases))
    table.add_row("sum", *(_sum(plan, row.phases[phase]) for phase in phases), style="bold")
    return table


def _table(title: str, *names: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def _sum(plan: Plan, parts: Bytes) -> str:
    nbytes = total(parts)
    text = _unit(plan).text(nbytes)
    return f"[red]{text}[/]" if plan.on_gpus and nbytes > plan.device.memory else text


def _processes(row: StagePlan, on_gpus: bool) -> str:
    beside = "".join(f" + {role}" for role in row.shared_with)
    what = "GPU" if on_gpus else "rank"
    return f"{row.name}{beside}, {row.gpus} {what}{'s' if row.gpus > 1 else ''}"


def lines_of(plan: Plan) -> list[str]:
    """Servers, host memory, disk and what the figures assume, one line each."""
    lines = []
    if (engine := plan.engine) is not None:
        lines.append(
            f"servers: {plan.servers}, each GPU with {gib(engine.weights)} GiB of weights and a cache of "
            f"{gib(max(engine.cache, 0))} GiB; a server's cache holds {engine.tokens:,} tokens of {engine.cell:,} bytes"
        )
    lines += [f"not planned: memory of {what}" for what in plan.not_planned]
    host = plan.host
    parts = ", ".join(f"{name} {gib(n)}" for name, n in host.parts.items() if n)
    of = f" of {gib(host.memory)}" if plan.on_gpus else ""
    lines.append(f"host memory: {gib(host.total)}{of} GiB on node {host.node} ({parts}; page cache not counted)")
    lines.append(_disk(plan))
    if any(row.expert_parameters for row in plan.stages):
        lines.append(f"experts: the busiest rank has {plan.imbalance:g} times the average rows (--imbalance)")
    if plan.on_gpus:
        found = {part for row in plan.stages for one in row.phases.values() for part in one}
        lines += [f"allowance for {a.part}: {a.what} ({a.source})" for a in ALLOWANCES if a.part in found]
    return lines


def _disk(plan: Plan) -> str:
    disk, unit = plan.disk, _unit(plan)
    if disk is None:
        return "disk: known once the model is fetched"
    shared = ", ".join(f"{name} {unit.text(n)}" for name, n in disk.shared.items() if n)
    text = f"disk: {unit.text(sum(disk.shared.values()))} {unit.name} on the shared file system ({shared})"
    if disk.node:
        own = ", ".join(f"{name} {unit.text(n)}" for name, n in disk.node.items() if n)
        used, there = sum(disk.node.values()), disk.node_disk
        text += f", {unit.text(used)} of {unit.text(there)} {unit.name} on each node's disk ({own})"
    return text


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan with sizes in GiB. `stages` has a row for each kind of GPU, `phases` the GiB by part."""
    engine, disk = plan.engine, plan.disk
    return {
        "fits": plan.fits,
        "verdict": plan.verdict(),
        "problems": plan.problems(),
        "not_planned": list(plan.not_planned),
        "spare": round(plan.spare, _DIGITS) if plan.on_gpus else None,
        "device": plan.device.name,
        "device_gib": _gib(plan.device.memory),
        "imbalance": plan.imbalance,
        "stages": [_row(row) for row in plan.stages],
        "engine": None
        if engine is None
        else {
            "servers": plan.servers,
            "weights_gib": _gib(engine.weights),
            "cache_gib": _gib(max(engine.cache, 0)),
            "cache_tokens": engine.tokens,
            "bytes_per_token": engine.cell,
            "least_mem_fraction_static": round(engine.least_fraction, _DIGITS),
        },
        "host_gib": {
            "node": plan.host.node,
            "total": _gib(plan.host.total),
            "memory": _gib(plan.host.memory),
            "parts": _gibs(plan.host.parts),
        },
        "disk_gib": None
        if disk is None
        else {
            "shared": _gibs(disk.shared),
            "node": _gibs(disk.node),
            "checkpoint": _gib(disk.checkpoint),
            "node_disk": _gib(disk.node_disk),
        },
        "allowances": [{"part": a.part, "what": a.what, "source": a.source} for a in ALLOWANCES],
        "step_s": None if plan.step_s is None else dict(plan.step_s),
    }


def write_plan(path: Path, plan: Plan) -> None:
    path.write_text(json.dumps(plan_json(plan), indent=2) + "\n", encoding="utf-8")


def _row(row: StagePlan) -> dict[str, Any]:
    return {
        "role": row.role,
        "stage": row.stage,
        "gpus": row.gpus,
        "layers": row.layers,
        "parameters": row.parameters,
        "expert_parameters": row.expert_parameters,
        "shared_with": list(row.shared_with),
        "phases": {phase: _with_total(row.phases[phase]) for phase in phases_of(row)},
    }


def _with_total(parts: Bytes) -> dict[str, float]:
    return {**_gibs(parts), "total": _gib(total(parts))}


def _gibs(parts: Mapping[Any, int]) -> dict[str, float]:
    items: Iterable[tuple[Any, int]] = parts.items()
    return {str(name): _gib(n) for name, n in items}


def _gib(nbytes: int) -> float:
    return round(nbytes / GIB, _DIGITS)

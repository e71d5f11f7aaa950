"""The ranking of a search as a table and as JSON, and the chosen layout as a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from rich import box
from rich.console import Console
from rich.table import Table

from miles_like.config.load import dump_config
from miles_like.layout_search.search import Found, Searched

_COLUMNS = (
    "",
    "GPUs",
    "tokens/s",
    "per GPU",
    "step s",
    "GPU h / B tokens",
    "limited by",
    "trainer",
    "servers",
    "spare",
)


def print_search(console: Console, searched: Searched) -> None:
    """The layouts, the best first, and why others are not among them."""
    table = Table(title="Layouts by predicted speed, best first", title_justify="left", box=box.SIMPLE)
    for number, name in enumerate(_COLUMNS):
        table.add_column(name, justify="right" if 1 <= number <= 5 else "left", overflow="fold")
    for rank, one in enumerate(searched.found, 1):
        time = one.time
        figures = (f"{time.tokens_per_s:,.0f}", f"{time.tokens_per_s_per_gpu:,.1f}", f"{time.seconds:,.0f}")
        cells = (f"{one.gpu_hours:,.0f}", time.decides, trainer_of(one), servers_of(one), f"{one.plan.spare:.0%}")
        table.add_row(str(rank), f"{time.gpus:,}", *figures, *cells)
    console.print(table)
    for line in lines_of(searched):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def trainer_of(one: Found) -> str:
    """`TP4 PP16 EP8 DP2, full recomputation, optimizer on the host`."""
    p = one.config.parallel
    sizes = {"TP": p.tp, "PP": p.pp, "VPP": p.vpp, "CP": p.cp, "EP": p.ep, "ETP": p.etp, "DP": p.dp}
    text = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"
    recompute = one.config.train.recompute
    text += f", {'no' if recompute == 'none' else recompute} recomputation"
    return text + (", optimizer on the host" if one.config.kernels.offload_optimizer else "")


def servers_of(one: Found) -> str:
    """`4 x TP32 EP32 DP32 DeepEP, fp8, on the trainer's GPUs, published by disk`."""
    rollout = one.config.rollout
    flags = rollout.sglang
    sizes = {"TP": flags.tp_size, "EP": flags.ep_size, "DP": flags.dp_size if flags.enable_dp_attention else 1}
    text = f"{rollout.servers} x " + (" ".join(f"{n}{s}" for n, s in sizes.items() if s > 1) or "one GPU")
    text += " DeepEP" if flags.moe_a2a_backend == "deepep" else ""
    where = "on the trainer's GPUs" if one.config.takes_turns else "on separate GPUs"
    return f"{text}, {one.config.precision.format.value}, {where}, published by {one.config.publish.path}"


def lines_of(searched: Searched) -> list[str]:
    """How many layouts were timed and planned, and for each reason of a refusal their number and one example."""
    lines = [
        f"{searched.considered:,} divisions of ranks and servers considered, {searched.planned} planned completely"
    ]
    if not searched.found:
        lines.append("no layout fits: use more nodes, or devices with more memory")
    for reason, number in searched.refusals.counts.most_common():
        lines.append(f"rejected by {reason}: {number:,}, for example: {searched.refusals.sentences[reason]}")
    return lines


def search_json(searched: Searched) -> dict[str, Any]:
    """`layouts`, the best first, with their keys, seconds by phase and term, and memory."""
    return {
        "considered": searched.considered,
        "planned": searched.planned,
        "refused": dict(searched.refusals.counts),
        "layouts": [
            {
                "change": dict(one.change),
                "gpus": one.time.gpus,
                "tokens_per_s": one.time.tokens_per_s,
                "tokens_per_s_per_gpu": one.time.tokens_per_s_per_gpu,
                "gpu_hours_per_billion_tokens": one.gpu_hours,
                "decides": one.time.decides,
                "step_s": one.time.flat(),
                "spare": one.plan.spare,
            }
            for one in searched.found
        ],
    }


def chosen_toml(one: Found, extends: Path, path: Path) -> str:
    """The configuration of a layout for the file `path`: what differs from `extends`, or, where a key of it has to go,
    the whole configuration."""
    head = f"# {trainer_of(one)}; {servers_of(one)}.\n# Predicted: {one.time.seconds:,.0f} s a step"
    head += f" ({one.time.decides}), {one.time.tokens_per_s_per_gpu:,.1f} tokens/s/GPU.\n"
    if any(value is None for value in one.change.values()):
        return head + dump_config(one.config)
    base = os.path.relpath(extends.resolve(), path.resolve().parent)
    return head + tomli_w.dumps({"extends": base, **_tree(one.change)})


def _tree(change: Mapping[str, object]) -> dict[str, Any]:
    """Sections of dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in change.items():
        *parents, leaf = key.split(".")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = value
    return tree

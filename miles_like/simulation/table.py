"""The main figures of a simulated run, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from miles_like.simulation.figures import SimulationFigures


def figures_table(figures: SimulationFigures, name: str) -> Table:
    step, goodput, groups, faults = figures["step_s"], figures["goodput"], figures["groups"], figures["faults"]
    table = Table("metric", "value", title=f"{name}, {figures['steps']} steps simulated, {figures['warm']} not counted")
    table.add_row("seconds per step", f"{step['mean']:.3g} mean, {step['median']:.3g} median, {step['p90']:.3g} p90")
    table.add_row("trainer idle", f"{figures['trainer_idle']:.1%}")
    table.add_row(
        "servers idle", f"{figures['servers_idle']:.1%}; while the trainer: {_listed(figures['servers_idle_while'])}"
    )
    table.add_row("trainer's time", _listed(figures["trainer"]))
    table.add_row("batch size of a busy server", f"{figures['running']:.1f} samples")
    table.add_row("waiting for samples, per step", _listed(figures["waits_s"], "{:.3g} s") or "never")
    table.add_row("staleness", _listed(figures["staleness"]))
    table.add_row(
        "trained",
        f"{goodput['tokens_per_s']:.4g} tokens/s, {goodput['samples_per_s']:.4g} samples/s, "
        f"{goodput['useful']:.1%} of the sampled tokens",
    )
    table.add_row("groups", f"{groups['trained']} trained, discarded: {groups['discarded'] or 'none'}")
    if faults["ended_runs"] or faults["server_restarts"]:
        table.add_row(
            "faults",
            f"{faults['ended_runs']} ended the run, {faults['lost_steps']} steps lost, "
            f"{faults['server_restarts']} servers restarted",
        )
    if figures["cores"] is not None:
        table.add_row("cores kept busy", f"{figures['cores']:.2f}")
    return table


def _listed(values: Mapping[str, float], form: str = "{:.1%}") -> str:
    return ", ".join(f"{key} {form.format(value)}" for key, value in values.items() if value > 5e-4)

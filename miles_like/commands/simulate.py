"""`miles-like simulate`: the loop of a configuration in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.options import check_writable
from miles_like.commands.output import console

OWN = "simulation."


def simulate(
    config: Path,
    run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN_DIR", help="take response lengths and step times from this run"),
    ] = None,
    lengths_from: Annotated[
        Path | None,
        typer.Option(
            "--lengths-from", metavar="DIR", help="take only response lengths, from a directory of step_N.jsonl"
        ),
    ] = None,
    overrides: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="override a configuration key or a simulation.KEY")
    ] = [],  # noqa: B006  typer does not change the default
    json: Annotated[Path | None, typer.Option("--json", help="write all results to this file")] = None,
    gantt: Annotated[Path | None, typer.Option("--gantt", help="draw some steps into this PNG file")] = None,
) -> None:
    """Simulate the loop of a configuration: step time, idle shares, staleness, goodput."""
    with one_sentence():
        import json as jsons

        from miles_like.config.load import load_config
        from miles_like.limits.regular_files import replace_bytes
        from miles_like.run.simulation_inputs import assumed_tree, loop_settings, read_assumptions
        from miles_like.simulation.figures import figures_of
        from miles_like.simulation.inputs.lengths import DrawnAnswers
        from miles_like.simulation.simulate import simulate as run_simulation
        from miles_like.simulation.table import figures_table

        own = [text for text in overrides if text.startswith(OWN)]
        loaded = load_config(config, [text for text in overrides if not text.startswith(OWN)])
        for file in (json, gantt):
            if file is not None:
                check_writable(file)
        tree, answers = assumed_tree(loaded, run, own, lengths_from)
        assumed = read_assumptions(tree)
        settings = loop_settings(loaded, assumed)
        source = answers or DrawnAnswers(lengths=assumed.lengths, limit=settings.limit)
        outcome = run_simulation(settings, assumed, source)
        figures = figures_of(outcome)
        console().print(figures_table(figures, config.stem))
        if json is not None:
            given = {"config": str(config), "assumptions": assumed.model_dump(mode="json"), **figures}
            replace_bytes(json, (jsons.dumps(given, indent=1) + "\n").encode())
        if gantt is not None:
            from miles_like.simulation.gantt import write_gantt  # imports matplotlib, which is slow

            write_gantt(outcome, gantt, title=config.stem)

"""`miles-like plan`: memory, disk and step time that a run needs, computed without its devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from miles_like.command_errors import one_sentence
from miles_like.commands.options import SetOption, check_writable
from miles_like.commands.step_time import Asked, not_timed, predicted, report, searched
from miles_like.config.load import load_config
from miles_like.device_table import DEVICES
from miles_like.device_table import device as named_device
from miles_like.pipeline.stages import plan_stages
from miles_like.planning.compose import IMBALANCE
from miles_like.planning.table import print_plan, write_plan
from miles_like.run import assemble
from miles_like.run.setup.run_cluster import RunCluster
from miles_like.timing.table import print_step


def plan(
    path: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="a run's configuration")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="the same, as an option")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="the plan, with sizes in GiB")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help=f"in place of cluster.device: {', '.join(DEVICES)}")
    ] = None,
    imbalance: Annotated[
        float, typer.Option("--imbalance", min=1.0, help="rows of the busiest rank's experts over the average")
    ] = IMBALANCE,
    prompt: Annotated[float | None, typer.Option("--prompt", min=1, help="mean tokens of a prompt")] = None,
    response: Annotated[float | None, typer.Option("--response", min=1, help="mean tokens of a response")] = None,
    reward_s: Annotated[float, typer.Option("--reward-seconds", min=0, help="of one score")] = 0.0,
    search: Annotated[bool, typer.Option("--search", help="rank other layouts by predicted tokens/s")] = False,
    nodes: Annotated[str | None, typer.Option("--nodes", help="of the search: 16, or 8,16,32")] = None,
    by: Annotated[str | None, typer.Option("--by", help="of the search: speed, or cost in GPU-hours a token")] = None,
    formats: Annotated[str | None, typer.Option("--formats", help="of the search: bf16,fp8,...")] = None,
    write: Annotated[Path | None, typer.Option("--write", help="the search's best layout, as TOML")] = None,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
) -> None:
    """Plan a run: memory by pipeline stage and phase, host memory, disk, and seconds of a step; status 1 if it does not
    fit. With --search instead: other layouts that fit, by predicted speed; status 1 if there is none."""
    console = Console(width=None if Console().is_terminal else _WIDE)
    with one_sentence():
        given = _one_of(path, config)
        _check_search(search, {"--nodes": nodes, "--by": by, "--formats": formats, "--write": write})
        loaded = load_config(given, overrides)
        if (model := assemble.known_model(loaded)) is None:
            raise ValueError(
                f"model.path = {loaded.model.path!r} is not here, and without its config.json nothing can be planned: "
                "give model.config, a config.json to plan with"
            )
        on = named_device(loaded.cluster.device if device is None else device)
        asked = Asked(prompt=prompt, response=response, reward_s=reward_s)
        facts = asked.facts(loaded, on, imbalance)
        for file in (json, write):
            if file is not None:
                check_writable(file)
        if search:
            ranked = searched(loaded, model, facts, nodes=nodes, formats=formats, by=by)
            report(console, ranked, given, json_path=json, write=write)
            raise typer.Exit(0 if ranked.found else 1)
        cluster = RunCluster(loaded, _RUN_DIR, console, None)
        stages = plan_stages(loaded, _RUN_DIR, assemble.stage_functions(loaded, model, console, cluster), mode="fresh")
        found = assemble.memory_plan(loaded, model, stages, on=on, imbalance=imbalance)
        print_plan(console, found)
        if (timed := predicted(loaded, model, found, asked)) is not None:
            setup, time = timed
            print_step(console, time, setup)
            found = replace(found, step_s=time.flat())
        if (line := not_timed(loaded, model, found)) is not None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if json is not None:
            write_plan(json, found)
        if not found.fits:
            console.print(assemble.memory_refusal(loaded, model, found), markup=False, highlight=False, soft_wrap=True)
    if not found.fits:
        raise typer.Exit(1)


_RUN_DIR = Path("runs/plan")  # nothing is written there
_WIDE = 200  # columns of a table in a file


def _check_search(search: bool, options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if value is not None and not search:
            raise ValueError(f"{name} {value} does nothing without --search: add it, or remove {name}")


def _one_of(argument: Path | None, option: Path | None) -> Path:
    if (argument is None) == (option is None):
        raise ValueError("miles-like plan needs one configuration: as its argument, or with --config")
    found = argument or option
    assert found is not None
    return found

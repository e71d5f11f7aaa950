"""`miles-like plan`: memory, disk and step time that a run needs, computed without its devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.options import SetOption, check_writable
from miles_like.commands.output import console
from miles_like.device_table import DEVICES


def plan(
    path: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="a run's configuration")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="the configuration, as an option instead of the argument")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="write the plan to this file, sizes in GiB")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help=f"use this device instead of cluster.device: {', '.join(DEVICES)}")
    ] = None,
    imbalance: Annotated[
        float | None,
        typer.Option(
            "--imbalance", min=1.0, help="tokens of the busiest rank's experts, relative to the average; default: 1.25"
        ),
    ] = None,
    prompt: Annotated[float | None, typer.Option("--prompt", min=1, help="mean prompt length in tokens")] = None,
    response: Annotated[float | None, typer.Option("--response", min=1, help="mean response length in tokens")] = None,
    reward_s: Annotated[float, typer.Option("--reward-seconds", min=0, help="seconds to score one sample")] = 0.0,
    search: Annotated[bool, typer.Option("--search", help="rank other layouts by predicted tokens/s")] = False,
    nodes: Annotated[str | None, typer.Option("--nodes", help="with --search: numbers of nodes, e.g. 8,16,32")] = None,
    by: Annotated[
        str | None, typer.Option("--by", help="with --search: rank by speed or by cost (GPU-hours per token)")
    ] = None,
    formats: Annotated[str | None, typer.Option("--formats", help="with --search: formats, e.g. bf16,fp8")] = None,
    write: Annotated[
        Path | None, typer.Option("--write", help="with --search: write the best layout to this TOML file")
    ] = None,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
) -> None:
    """Plan a run: memory by pipeline stage and phase, host memory, disk and step time.

    Exits 1 if the run does not fit. With --search it ranks other layouts that fit by predicted speed, and exits 1 if
    there are none.
    """
    with one_sentence():
        from miles_like.config.load import load_config
        from miles_like.run.plan import Predictions, SearchOptions, plan_run, search_layouts

        given = _one_of(path, config)
        _check_search(search, {"--nodes": nodes, "--by": by, "--formats": formats, "--write": write})
        loaded = load_config(given, overrides)
        asked = Predictions(device=device, imbalance=imbalance, prompt=prompt, response=response, reward_s=reward_s)
        for file in (json, write):
            if file is not None:
                check_writable(file)
        out = console()
        if search:
            how = SearchOptions(nodes=nodes, by=by, formats=formats)
            fits = search_layouts(loaded, given, asked, how, out, json=json, write=write)
        else:
            fits = plan_run(loaded, asked, out, json=json)
    if not fits:
        raise typer.Exit(1)


def _check_search(search: bool, options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if value is not None and not search:
            raise ValueError(f"{name} {value} has no effect without --search: add --search, or remove {name}")


def _one_of(argument: Path | None, option: Path | None) -> Path:
    if (argument is None) == (option is None):
        raise ValueError("miles-like plan needs one configuration: pass it as the argument, or with --config")
    found = argument or option
    assert found is not None
    return found

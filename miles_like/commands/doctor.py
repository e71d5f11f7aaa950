"""`miles-like doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.options import SetOption, check_writable
from miles_like.commands.output import console


def doctor(
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", help="examine all nodes of this Ray cluster")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="check nodes, GPUs, ports and disks against this run's configuration"),
    ] = None,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="run directory, whose disk is examined too")] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="write all findings and measurements to this file")
    ] = None,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
) -> None:
    """Examine the nodes of a Ray cluster, or this machine, and print a remedy for each fault.

    Exits 1 if there is a fault.
    """
    with one_sentence():
        from miles_like.config.load import load_config
        from miles_like.doctor.report import print_examination, write_examination
        from miles_like.preflight.examination import examine_nodes
        from miles_like.run import assemble
        from miles_like.variables import ray_address as address_of

        out = console()
        loaded = None if config is None else load_config(config, overrides)
        of_run = [*(f"--set {one}" for one in overrides), *([] if run_dir is None else [f"--run-dir {run_dir}"])]
        if config is None and of_run:
            raise ValueError(f"{of_run[0]} has no effect without --config: pass the run's configuration")
        if json is not None:
            check_writable(json)
        try:
            found = examine_nodes(loaded, address_of(ray_address), out, None if run_dir is None else run_dir.resolve())
        finally:
            assemble.shut_down()
        print_examination(out, found)
        if json is not None:
            write_examination(json, found)
    if not found.ok:
        raise typer.Exit(1)

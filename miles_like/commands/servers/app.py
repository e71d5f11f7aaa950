"""`miles-like servers`: the rollout servers of a run, which are added and removed while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.config.lines import columns
from miles_like.commands.options import Command, Group
from miles_like.commands.output import echo

servers = typer.Typer(
    cls=Group, no_args_is_help=True, help="List the rollout servers of a run, and add or remove some while it runs."
)
RunArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="directory of a run on this file system")]


@servers.command("list", cls=Command)
def list_servers(run_dir: RunArgument) -> None:
    """Print number, URL, state, weight version and restarts left of each server, and why it has its state."""
    with one_sentence():
        from miles_like.fleet.control import COLUMNS, status

        found = status(run_dir)
        rows = [tuple("" if row[c] is None else str(row[c]) for c in COLUMNS) for row in found["servers"]]
        for line in columns([COLUMNS, *rows]):
            echo(line)
        if found["ended"]:
            echo("The run has ended; these were the last states.")


@servers.command("add", cls=Command)
def add(run_dir: RunArgument) -> None:
    """Let the run start one more server, in the place of a retired one if there is one."""
    with one_sentence():
        from miles_like.fleet.control import Request, ask

        ask(run_dir, Request("add"))
        echo(f"Asked for. State: miles-like servers list {run_dir}")


@servers.command("remove", cls=Command)
def remove(
    run_dir: RunArgument,
    server: Annotated[int, typer.Argument(metavar="SERVER", help="its number in `list`")],
) -> None:
    """Let the run stop a server; other servers continue its samples."""
    with one_sentence():
        from miles_like.fleet.control import Request, ask

        ask(run_dir, Request("remove", server))
        echo(f"Asked for. State: miles-like servers list {run_dir}")

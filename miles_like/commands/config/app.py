"""`miles-like config`: what a configuration sets, and configurations of other projects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.config.lines import columns, explained
from miles_like.commands.options import Command, Group, SetOption
from miles_like.commands.output import echo

config = typer.Typer(cls=Group, no_args_is_help=True, help="Show, compare, explain and import configurations.")
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file or run directory")]


@config.command("show", cls=Command)
def show(
    config: ConfigArgument,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
    every: Annotated[bool, typer.Option("--all", help="also print keys that have their default")] = False,
) -> None:
    """Print the resolved configuration as TOML: what differs from the defaults, and where each value was set."""
    with one_sentence():
        from miles_like.config.settings import as_toml, read_settings

        for line in as_toml(read_settings(config, overrides), every=every):
            echo(line)


@config.command("diff", cls=Command)
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="TOML file or run directory")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another TOML file or run directory")],
) -> None:
    """Print the keys whose values differ, with status 1 if there are any."""
    with one_sentence():
        from miles_like.config.settings import differences, read_settings

        rows = list(differences(read_settings(a), read_settings(b)))
        for line in columns([("key", str(a), str(b)), *rows] if rows else []):
            echo(line)
    if rows:
        raise typer.Exit(1)


@config.command("explain", cls=Command)
def explain(
    key: Annotated[str, typer.Argument(metavar="KEY", help="key, for example train.steps, or section")],
) -> None:
    """Print a key's type, range, default and meaning, and which modules read it; for a section, its keys."""
    with one_sentence():
        from miles_like.config.explain import explain as explain_key

        for line in explained(explain_key(key)):
            echo(line)


@config.command("import", cls=Command)
def import_config(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="verl: YAML or a script; slime, Miles: a script; prime-rl: TOML")
    ],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="PROJECT", help="verl, slime, miles or prime-rl; default: by the keys"),
    ] = None,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
) -> None:
    """Translate another project's configuration to TOML, with comments on how each key was translated."""
    with one_sentence():
        from miles_like.config.foreign.report import imported_lines

        for line in imported_lines(file, source, overrides):
            echo(line)

"""The table of docs/commands.md names every command, its arguments and options that exist.

Why it must hold: the table is where a user looks for a command. Not covered: what a command does; options that the
table leaves to `--help`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from miles_like.cli import app

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `((?:miles-like|python) [^`]+)`(.*)\|.*\|$", re.MULTILINE)
ROWS = [row[0].replace(r"\|", "|") for row in ROW.findall((ROOT / "docs" / "commands.md").read_text())]
OF_THE_SCRIPT = {"config", "stages"}  # options of scripts/run_deepseek.py that `train` has in another form


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(words on the command line, command) of every command below this one."""
    for word, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {word}")
    if not hasattr(command, "commands"):
        yield name, command


COMMANDS = dict(commands(typer.main.get_command(app), "miles-like"))


def script() -> Any:
    spec = importlib.util.spec_from_file_location("run_deepseek", ROOT / "scripts" / "run_deepseek.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    app = typer.Typer(add_completion=False)
    app.command()(module.main)
    return typer.main.get_command(app)


def missing(row: str, command: Any) -> list[str]:
    """Required arguments and options that the row lacks, and options of the row that the command does not have."""
    required = [one for one in command.params if one.required]
    arguments = [one.name.upper() for one in required if not one.opts[0].startswith("-")]
    options = [one.opts[0] for one in required if one.opts[0].startswith("-")]
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    return [word for word in (*arguments, *options) if word not in row] + [
        option for option in re.findall(r"--[a-z-]+", row) if option not in known
    ]


def test_every_command_has_one_row_with_what_it_requires() -> None:
    of = {name: [row for row in ROWS if re.match(rf"{re.escape(name)}(?![\w-])", row)] for name in COMMANDS}
    assert {name: len(rows) for name, rows in of.items()} == dict.fromkeys(COMMANDS, 1)
    assert {name: bad for name, rows in of.items() if (bad := missing(rows[0], COMMANDS[name]))} == {}
    (row,) = (row for row in ROWS if row.startswith("python "))
    assert len(ROWS) == len(COMMANDS) + 1 and missing(row, script()) == []


def test_the_row_of_training_names_all_its_options() -> None:
    """So the script's, whose row refers to it."""
    (row,) = (row for row in ROWS if row.startswith("miles-like train "))
    train = COMMANDS["miles-like train"]
    assert [one.opts[0] for one in train.params if one.opts[0] not in row and one.name not in OF_THE_SCRIPT] == []


def test_the_script_has_the_options_of_training() -> None:
    """One declaration serves both, so their texts cannot part."""
    of_train = {one.name: one for one in COMMANDS["miles-like train"].params}
    of_script = {one.name: one for one in script().params}
    assert of_script.keys() == of_train.keys()
    for name in of_train.keys() - OF_THE_SCRIPT:
        a, b = of_script[name], of_train[name]
        assert (a.opts, a.secondary_opts, a.help) == (b.opts, b.secondary_opts, b.help) and a.help, name


def test_a_wrong_row_is_found() -> None:
    command = COMMANDS["miles-like train"]
    assert missing("miles-like train CONFIG --rundir DIR", command) == ["--run-dir", "--rundir"]

"""Help, a version, a mistyped command and a mistyped key are answered without the libraries of training, which take
seconds to import.

Why it must hold: a user waits for each of them at a terminal. Not covered: seconds, what each command prints beside its
help.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

import miles_like
from miles_like.cli import app
from miles_like.commands import output
from miles_like.report.console import ConsoleSink
from tests.support.cli_runner import CliRunner

SLOW = "torch numpy ray transformers safetensors datasets matplotlib asyncio"


@pytest.fixture
def as_before() -> Iterator[None]:
    """Output options are those of a process."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    output._quiet = output._json = False
    logging.getLogger("miles_like").setLevel(logging.NOTSET)
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(scope="module")
def light() -> str:
    """What a process prints that answers each kind of question, and then the slow modules it has imported."""
    program = f"""
import sys
from typer.testing import CliRunner
from miles_like.cli import app
questions = "--help", "--version", "trian", "train --rundir x", "train --help", "eval --help"
of_keys = "train tiny --run-dir no/such --set steps=3", "verify --config tiny --set steps=3"
for several in (questions, of_keys):
    print([CliRunner().invoke(app, words.split()).exit_code for words in several])
    print(sorted(set({SLOW!r}.split()) & set(sys.modules)))
"""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_questions_are_answered_without_slow_imports(light: str) -> None:
    assert light.splitlines() == ["[0, 0, 2, 2, 0, 0]", "[]", "[2, 2]", "['asyncio']"]


def test_the_python_api_is_imported_without_slow_libraries() -> None:
    program = f"import sys, miles_like; dir(miles_like); print(set({SLOW!r}.split()) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


def test_every_command_has_a_panel_and_help_of_one_sentence() -> None:
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert command.rich_help_panel in ("Runs", "Checkpoints", "Plans and nodes", "Data"), name
        assert command.help and command.help.split("\n")[0].endswith((".", "1", "not", "with")), (name, command.help)


def test_the_version_is_that_of_the_installed_package() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.stdout == f"miles-like {miles_like.__version__}\n"
    assert importlib.metadata.version("miles-like") == miles_like.__version__


@pytest.mark.usefixtures("as_before")
def test_quiet_leaves_errors_and_the_status(tmp_path: Any) -> None:
    words = ["plan", "configs/tiny.toml"]
    loud, quiet = CliRunner().invoke(app, words), CliRunner().invoke(app, ["--quiet", *words])
    assert loud.exit_code == quiet.exit_code == 0 and loud.stdout and quiet.stdout == ""
    refused = CliRunner().invoke(app, ["--quiet", "report", str(tmp_path / "none")])
    assert refused.exit_code == 2 and refused.stderr.startswith("error: ")


@pytest.mark.usefixtures("as_before")
def test_a_log_level_is_set_or_refused() -> None:
    words = ["report", "/nowhere"]
    assert CliRunner().invoke(app, ["--log-level", "debug", *words]).exit_code == 2
    assert logging.getLogger().level == logging.DEBUG
    refused = CliRunner().invoke(app, ["--log-level", "loud", *words])
    assert refused.exit_code == 2 and "'loud'" in refused.stderr and "debug, info, warning, error" in refused.stderr


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "miles_like", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"miles-like {miles_like.__version__}\n"


def test_a_flag_has_no_type() -> None:
    """`--quiet <bool>` reads as if it took a value."""

    def commands(group: Any) -> Iterator[Any]:
        yield group
        for command in getattr(group, "commands", {}).values():
            yield from commands(command)

    for command in commands(typer.main.get_command(app)):
        shown = CliRunner().invoke(app, [*command_words(command), "--help"], env={"COLUMNS": "160"}).stdout
        assert "<bool>" not in shown


def command_words(command: Any) -> list[str]:
    inner = {"to-megatron", "to-hf", "check"}
    return ["convert", command.name] if command.name in inner else [command.name] if command.name in TOP else []


TOP = typer.main.get_command(app).commands.keys()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("as_before")
def test_json_progress_is_one_object_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """A program reads standard output, so nothing else may be on it; a nan is not JSON."""
    output.set_output(quiet=False, log_level="warning", json=True)
    sink = ConsoleSink(steps=9, console=output.console())
    output.echo("Ready in 3 s")
    for step in range(1, 6):
        sink.write(step, {"train/loss": math.nan, "rollout/truncated_frac": 1.0})
    sink.close()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 5] and "docs/troubleshooting.md#" in rows[5].pop("warning")
    assert rows[0] == {
        "step": 1,
        "train/loss": None,
        "rollout/truncated_frac": 1.0,
        "nonfinite_count": 1,
    }

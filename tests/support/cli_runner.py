"""typer's runner of commands. It builds all commands of the program once a process, not for each call: 50 ms."""

from __future__ import annotations

import functools

import typer.testing
from typer.main import get_command
from typer.testing import CliRunner, Result

typer.testing._get_command = functools.cache(get_command)  # type: ignore[attr-defined]

__all__ = ["CliRunner", "Result"]

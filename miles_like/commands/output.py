"""Where commands print: options that stand before every command (`miles-like --quiet COMMAND`)."""

from __future__ import annotations

import logging
from typing import Any, Literal, TypeAlias, get_args

from rich.console import Console

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[str, ...] = get_args(LogLevel)

_quiet = False


def set_output(*, quiet: bool, log_level: str) -> None:
    """Of this process: ranks and servers write to the logs of the run directory. Raises ValueError for a level that is
    not in LOG_LEVELS."""
    global _quiet
    if log_level not in LOG_LEVELS:
        raise ValueError(f"--log-level {log_level!r}: give one of {', '.join(LOG_LEVELS)}")
    _quiet = quiet
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s", force=True)


def console(**options: Any) -> Console:
    """A console for what a command prints; after `--quiet` silent, except on stderr."""
    return Console(quiet=_quiet and not options.get("stderr"), **options)


def echo(text: object) -> None:
    """Print one line as it is."""
    console().print(str(text), markup=False, highlight=False, soft_wrap=True)

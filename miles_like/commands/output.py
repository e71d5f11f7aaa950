"""Where commands print: options that stand before every command (`miles-like --quiet COMMAND`)."""

from __future__ import annotations

import logging
from typing import Any, Literal, TypeAlias, get_args

from rich.console import Console

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[str, ...] = get_args(LogLevel)

PIPE_WIDTH = 4096  # columns where the output is no terminal: no table is wrapped

_quiet = _json = False


def set_output(*, quiet: bool, log_level: str, verbose: bool = False, json: bool = False) -> None:
    """Of this process: ranks and servers write to the logs of the run directory.

    verbose: at least level info for the loggers of this project. json: print only the rows of steps, for programs.
    Raises ValueError for a level that is not in LOG_LEVELS.
    """
    global _quiet, _json
    if log_level not in LOG_LEVELS:
        raise ValueError(f"--log-level {log_level!r}: choose one of {', '.join(LOG_LEVELS)}")
    _quiet, _json = quiet, json
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("miles_like").setLevel(logging.INFO if verbose and log_level != "debug" else logging.NOTSET)


def console(**options: Any) -> Console:
    """A console for what a command prints, as wide as its lines unless it is a terminal; after `--quiet` silent, except
    on stderr."""
    if _json and not options.get("stderr"):
        from miles_like.report.console import JsonLines

        return JsonLines()
    made = Console(quiet=_quiet and not options.get("stderr"), **options)
    if not made.is_terminal and "width" not in options:
        made.width = PIPE_WIDTH
    return made


def silent() -> bool:
    """Whether no progress is printed: after `--quiet` and `--json`."""
    return _quiet or _json


def echo(text: object) -> None:
    """Print one line as it is."""
    console().print(str(text), markup=False, highlight=False, soft_wrap=True)

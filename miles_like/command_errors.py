"""Errors of commands and of the Python API. A command prints an error that the user can fix as one sentence, and an
internal error with the log that has its traceback; both end with status 2. The Python API raises the first as
`UserError` and leaves the second as it is."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console

DRIVER_LOG = "driver.log"
LOG_BYTES = 4 << 20  # a larger driver.log becomes driver.log.1, in place of an older one


class UserError(ValueError):
    """A mistake that the user can fix, or a process that failed: one sentence with the values and the remedy."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Raise an error inside whose message is meant for the user as `UserError`, with that error as its cause."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        if not is_foreseen(e):
            raise
        raise UserError(sentence(e)) from e


@contextlib.contextmanager
def one_sentence(logs: Path | None = None) -> Iterator[None]:
    """Print an error raised inside as a sentence and raise `typer.Exit`. Its traceback is written to driver.log in
    `logs` if that directory exists, and otherwise, for an internal error, to a temporary file.

    Functions raise ValueError, RuntimeError, OSError and MemoryError, with a message, for mistakes of the user and for
    failed processes. Any other exception, or one of these without a message, is an internal error.
    """
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as e:
        from miles_like.stopping import Stopped  # of asyncio, which a command's help does without

        if isinstance(e, Stopped):
            Console().print(f"stopped: {e}", markup=False, soft_wrap=True)
            raise typer.Exit(e.status) from None
        foreseen = is_foreseen(e)
        log = _write_traceback(logs, anywhere=not foreseen)
        console = Console(stderr=True, soft_wrap=True)
        console.print("[bold red]error:[/]", end=" ")
        # markup=False: the message may contain [brackets]
        console.print(sentence(e) if foreseen else fault(e, log), markup=False, highlight=False)
        raise typer.Exit(2) from None


def is_foreseen(error: Exception) -> bool:
    """Whether the message of an error is meant for the user."""
    # subclasses of ValueError and RuntimeError that the interpreter and libraries raise, with messages for programmers
    if isinstance(error, RecursionError | NotImplementedError | UnicodeError):
        return False
    return isinstance(error, ValueError | RuntimeError | OSError | MemoryError) and bool(sentence(error))


def sentence(error: Exception) -> str:
    """The message of an exception on one line; for an OSError without its number."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(text.split())


def fault(error: Exception, log: Path | None) -> str:
    """The sentence for an internal error."""
    words = sentence(error)
    named = f"{type(error).__name__}: {words[:500]}" if words else type(error).__name__
    where = f"{log} has the traceback" if log is not None else "the traceback could not be written"
    return f"internal error of miles-like ({named}); {where}: please report it"


def _write_traceback(logs: Path | None, *, anywhere: bool) -> Path | None:
    """Write the traceback of the current exception; return the file, or None where none could be written."""
    try:
        if logs is not None and logs.is_dir():
            path = logs / DRIVER_LOG
            if path.exists() and path.stat().st_size > LOG_BYTES:
                path.replace(path.with_name(f"{DRIVER_LOG}.1"))
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        elif anywhere:
            descriptor, name = tempfile.mkstemp(prefix="miles-like-", suffix=".log")
            path = Path(name)
        else:
            return None
        with os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace") as log:
            traceback.print_exc(file=log)
    except OSError:
        return None
    return path

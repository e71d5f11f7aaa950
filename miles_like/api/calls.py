"""How every function of the Python API is called: in a script or in a notebook, with errors of one sentence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from rich.console import Console

from miles_like.command_errors import user_errors
from miles_like.stopping import beside_loop

if TYPE_CHECKING:
    from miles_like.config.load import ConfigSource, Override

P = ParamSpec("P")
T = TypeVar("T")
Config: TypeAlias = str | Path | Mapping[str, Any]
Overrides: TypeAlias = Mapping[str, Any] | Sequence[str]


def from_python(function: Callable[P, T]) -> Callable[P, T]:
    """`function` for callers in Python: beside a running event loop it runs in a thread, and errors that the user can
    fix are `UserError`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with user_errors():
            return beside_loop(functools.partial(function, *args, **kwargs))

    return call


def console_of(quiet: bool) -> Console:
    """In a notebook one that prints plain text without bars: rich would make an HTML block of each line there, and
    Jupyter's output, which some versions call a terminal, has no cursor."""
    console = Console(quiet=quiet)
    if not console.is_jupyter:
        return console
    return Console(quiet=quiet, force_jupyter=False, force_terminal=False, width=console.width)


def source_of(config: Config) -> ConfigSource:
    """The configuration as `load_config` takes it."""
    return config if isinstance(config, Mapping) else Path(config)


def override_list(overrides: Overrides) -> list[Override]:
    """Overrides as `load_config` takes them. Raises ValueError for one text in place of a list."""
    if isinstance(overrides, str):
        raise ValueError(
            f"overrides = {overrides!r}: expected a dict such as {{'train.steps': 3}}, or a list of strings"
        )
    return [overrides] if isinstance(overrides, Mapping) else list(overrides)

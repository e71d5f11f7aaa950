"""Another project's configuration as TOML of this one, followed by a table, as comments, of what its keys became."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from miles_like.config.foreign import prime_rl, slime, verl
from miles_like.config.foreign.reading import Project, read_foreign
from miles_like.config.foreign.translation import Became, Translation
from miles_like.config.load import checked, parse_override
from miles_like.config.run import RunConfig
from miles_like.config.settings import toml_value

TRANSLATE: dict[Project, Callable[[Translation], None]] = {
    "verl": verl.translate,
    "slime": slime.translate,
    "miles": slime.translate,
    "prime-rl": prime_rl.translate,
}
_WIDE = 118  # of a comment


def translated(project: Project, given: dict[str, Any]) -> Translation:
    """What a project's keys become. Raises ValueError for a value of another type than its key's."""
    t = Translation(given)
    try:
        TRANSLATE[project](t)
    except (TypeError, AttributeError, ZeroDivisionError):
        raise ValueError(f"its value does not have the type that {project} expects") from None
    return t


def imported_lines(file: Path, project: str | None, overrides: Sequence[str] = ()) -> Iterator[str]:
    """Lines of TOML, comments included. overrides: `key=value`, which replace what was translated. Raises ValueError
    for a file that is no configuration of a known project."""
    known, given = read_foreign(file, project)
    try:
        t = translated(known, given)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None
    for text in overrides:
        for key, value in _leaves(parse_override(text)):
            t.ours[key] = value
    yield f"# Imported from {known}'s {file.name}. The end of this file lists how each key was translated."
    yield from _toml(t.tree)
    yield from _problems(t)
    yield from _table(known, t)


def _leaves(tree: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _toml(tree: dict[str, Any], before: str = "") -> Iterator[str]:
    """Sections in the order of the configuration, each key's value on one line."""
    order = {key: n for n, key in enumerate(RunConfig.model_fields)} if not before else {}
    plain = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    if plain:
        yield ""
        if before:
            yield f"[{before}]"
        yield from (f"{key} = {toml_value(value)}" for key, value in plain.items())
    for key in sorted(tree.keys() - plain.keys(), key=lambda key: order.get(key, 0)):
        yield from _toml(tree[key], f"{before}.{key}" if before else key)


def _problems(t: Translation) -> Iterator[str]:
    """What is to be decided, and what keeps it from being a configuration."""
    lines = list(t.to_do)
    try:
        checked(RunConfig, t.tree, "not a valid configuration yet")
    except ValueError as e:
        lines.append(str(e))
    if lines:
        yield ""
        yield "# To decide before a run:"
        for line in lines:
            yield from textwrap.wrap(line, _WIDE, initial_indent="#   ", subsequent_indent="#     ")


def _table(project: str, t: Translation) -> Iterator[str]:
    yield ""
    yield f"# {project} -> this configuration"
    width = max((len(row.theirs) for row in t.rows), default=0)
    for row in t.rows:
        if row.ours in t.ours:
            yield f"#   {row.theirs:{min(width, 60)}}  ->  {_ours(t, row)}"
    by_reason: dict[str, list[str]] = {}
    for theirs, why in t.left.items():
        by_reason.setdefault(why, []).append(theirs)
    if by_reason:
        yield ""
        yield "# without a counterpart"
    for why, names in by_reason.items():
        text = f"{', '.join(names)}: {why}"
        yield from textwrap.wrap(text, _WIDE, initial_indent="#   ", subsequent_indent="#     ", break_on_hyphens=False)


def _ours(t: Translation, row: Became) -> str:
    remark = f"  ({row.remark})" if row.remark else ""
    return f"{row.ours} = {toml_value(t.ours[row.ours])}{remark}"

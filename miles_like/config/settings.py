"""The settings of a configuration: each key's value, and where it was set."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from miles_like.config.load import SET, ConfigSource, Override, checked, origin_of, read_layers
from miles_like.config.run import RunConfig
from miles_like.config.sections.flat import FlatSection, choosers, fields, values

DEFAULT, DERIVED = "default", "derived from other keys"
STORED = "config.toml"  # of a run directory
Key = tuple[str, ...]
_REQUIRED = object()
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_COLUMN = 40  # of the comments, at most


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a resolved configuration."""

    key: Key
    value: Any  # None: not set
    source: str  # DEFAULT, DERIVED, SET, or the file
    is_default: bool

    @property
    def name(self) -> str:
        return ".".join(map(_key, self.key))


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a configuration, in the order of its sections."""

    config: RunConfig
    every: tuple[Setting, ...]
    sections: tuple[Key, ...]
    """Those that are there because the configuration names them, whatever keys they have."""


def read_settings(source: ConfigSource, overrides: Sequence[Override] = ()) -> Settings:
    """Of a TOML file, a run directory or a dict. Raises ValueError as `load_config`."""
    if isinstance(source, Path) and source.is_dir():
        source = source / STORED
    layers, origin = read_layers(source, overrides), origin_of(source)
    config = checked(RunConfig, layers.values, origin)
    usual, found = _flat(_usual(config)), []
    for key, value in _flat(config.model_dump(mode="json")).items():
        is_default = usual.get(key, _REQUIRED) == value
        set_by = _source(layers.sources, key) or (DEFAULT if is_default else DERIVED)
        found.append(Setting(key, value, set_by, is_default))
    return Settings(config, tuple(found), tuple(_named(config)))


def as_toml(settings: Settings, *, every: bool = False) -> Iterator[str]:
    """Lines of TOML that give the same configuration, with the source of each value as a comment. every: with the keys
    that have their default, and as comments those that are not set."""
    shown: dict[Key, list[Setting]] = {}
    for one in settings.every:
        section = one.key[:-1]
        if every or section in settings.sections or not one.is_default:
            shown.setdefault(section, []).extend([one] if every or not one.is_default else [])
    for section in sorted(shown, key=lambda key: key != ()):  # keys outside sections come first in TOML
        if section:
            if section != next(iter(shown)):
                yield ""
            yield f"[{'.'.join(map(_key, section))}]"
        for one in shown[section]:
            key = _key(one.key[-1])
            if one.value is None:
                yield f"# {key} is not set"
            else:
                yield f"{f'{key} = {toml_value(one.value)}':{_COLUMN}}  # {_shown_source(one.source)}"


def differences(a: Settings, b: Settings) -> Iterator[tuple[str, str, str]]:
    """(key, value of a, value of b) of the keys that differ, as TOML writes the values."""
    of_a, of_b = ({one.name: one.value for one in settings.every} for settings in (a, b))
    for name in dict.fromkeys([*of_a, *of_b]):
        if (first := of_a.get(name)) != (second := of_b.get(name)):
            yield name, toml_value(first), toml_value(second)


def toml_value(value: Any) -> str:
    """A value on one line; None: "not set"."""
    if value is None:
        return "not set"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {toml_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else toml_value(name)


def _shown_source(source: str) -> str:
    """A file below the working directory is relative to it."""
    if source in (SET, DEFAULT, DERIVED):
        return source
    near = os.path.relpath(source)
    return source if near.startswith("..") else near


def _flat(tree: Mapping[str, Any], before: Key = ()) -> dict[Key, Any]:
    """Key -> value of a tree; an empty table is a value."""
    out: dict[Key, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            out |= _flat(value, (*before, name))
        else:
            out[(*before, name)] = value
    return out


def _source(sources: Mapping[str, Any], key: Key) -> str | None:
    found: Any = sources
    for name in key:
        if isinstance(found, str) or found is None:
            break
        found = found.get(name)
    return found if isinstance(found, str) else None


def _plain(value: Any) -> Any:
    """As the JSON form of the configuration has it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def _inner(value: Any) -> Any:
    """Of a section, or a table of them: what their keys would be; of another value: itself."""
    if isinstance(value, BaseModel):
        return _usual(value)
    if isinstance(value, Mapping) and any(isinstance(one, BaseModel) for one in value.values()):
        return {name: _inner(one) for name, one in value.items()}
    return None


def _usual(section: BaseModel) -> dict[str, Any]:
    """What the keys of `section` and of the sections in it would be if they were not given."""
    if isinstance(section, FlatSection):
        return _usual_flat(section)
    out: dict[str, Any] = {}
    for key, field in type(section).model_fields.items():
        if not field.is_required():
            _put(out, key, field.get_default(call_default_factory=True), getattr(section, key))
        elif (inner := _inner(getattr(section, key))) is not None:
            out[key] = inner
    return out


def _put(out: dict[str, Any], key: str, default: object, value: object) -> None:
    """A table of plain values is one value: where it differs, none of its entries is the default's."""
    if (inner := _inner(value)) is not None:
        out[key] = inner
    elif not isinstance(default, Mapping) or default == value:
        out[key] = _plain(default)


def _usual_flat(section: FlatSection) -> dict[str, Any]:
    """A key that chooses a part has the default of the first such key's value, as a preset; another key has the default
    of the parts that are chosen."""
    cls, text = type(section), values(section)
    by = [key for key in fields(cls) if key in choosers(cls)]
    first, chosen = (_values_of(cls, {key: text[key] for key in keys}) for keys in (by[:1], by))
    none = _values_of(cls, {})
    out: dict[str, Any] = {}
    for key, value in text.items():
        base = none if key in by[:1] else first if key in by else chosen
        _put(out, key, base.get(key, _REQUIRED), value)
    return out


def _values_of(cls: type[FlatSection], text: Mapping[str, Any]) -> dict[str, Any]:
    """Of a section with this text; {}: it needs more keys."""
    try:
        return values(cls.model_validate({key: value for key, value in text.items() if value is not None}))
    except (ValidationError, ValueError):
        return {}


def _named(section: BaseModel, before: Key = ()) -> Iterator[Key]:
    """Sections in `section` that are absent by default, and those of a table that the user names."""
    for key, value in values(section).items():
        at = (*before, key)
        if isinstance(value, BaseModel):
            field = fields(type(section))[key]
            if not field.is_required() and field.get_default(call_default_factory=True) is None:
                yield at
            yield from _named(value, at)
        elif isinstance(value, Mapping):
            for name, one in value.items():
                if isinstance(one, BaseModel):
                    yield (*at, name)
                    yield from _named(one, (*at, name))

"""TOML with `extends`, plus `--set section.key=value`, to one RunConfig; and back to TOML.

A string that starts with `./` or `../`, a value or a key, is a path relative to the file it stands in (from `--set`: to
the working directory); any other string is taken as it is, so hub names need no escaping. An unknown key is an error
that names the nearest known one.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError

from miles_like.config import RunConfig

M = TypeVar("M", bound=BaseModel)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path`, what it extends, and the overrides, into one checked RunConfig.

    Raises ValueError with one line a problem: what is wrong, where, and the nearest known key.
    """
    return checked(RunConfig, read_tree(path, overrides), str(path))


def read_tree(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """`path`, if there is one, what it extends, and the overrides, not yet checked."""
    tree = {} if path is None else _read(path, seen=())
    for text in overrides:
        _merge(tree, _spelt_out(parse_override(text)))
    return tree


def checked(model: type[M], tree: Mapping[str, Any], said: str) -> M:
    """Raises ValueError as `load_config`; `said`: where the tree is from."""
    try:
        return model.model_validate(tree)
    except ValidationError as e:
        raise ValueError(f"{said}: " + "; ".join(_problem(err) for err in e.errors())) from None


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as TOML; reading it back gives an equal RunConfig."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=value` as a tree; the value is read as TOML and, when it is none, as a plain string."""
    key, eq, value = text.partition("=")
    if not eq or not key.strip():
        raise ValueError(f"--set {text!r}: want section.key=value, for example --set train.steps=10")
    try:
        parsed: Any = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        parsed = value
    if isinstance(parsed, str):
        parsed = _rooted(parsed, Path.cwd())
    tree: dict[str, Any] = {}
    node = tree
    *parents, leaf = key.strip().split(".")
    for name in parents:
        node = node.setdefault(name, {})
    node[leaf] = parsed
    return tree


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise ValueError(f"{path}: `extends` goes in a circle: {' -> '.join(p.name for p in (*seen, path))}")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no configuration file {path}: give --config the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is not TOML: {e}") from None
    base = tree.pop("extends", None)
    tree = _spelt_out({k: _rooted(v, path.parent) for k, v in tree.items()})
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ValueError(f"{path}: `extends` must name one file, not {base!r}")
    merged = _read(path.parent / base, (*seen, path))
    _merge(merged, tree)
    return merged


def _spelt_out(tree: dict[str, Any]) -> dict[str, Any]:
    """`algorithm = "dapo"` is short for `algorithm.name`, and leaves what is set beside it."""
    name = tree.get("algorithm")
    return tree | {"algorithm": {"name": name}} if isinstance(name, str) else tree


def _rooted(value: Any, root: Path) -> Any:
    if isinstance(value, dict):
        return {_rooted(k, root): _rooted(v, root) for k, v in value.items()}
    if isinstance(value, list):
        return [_rooted(v, root) for v in value]
    if isinstance(value, str) and value.startswith(("./", "../")):
        return str((root / value).resolve())
    return value


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _problem(error: Mapping[str, Any]) -> str:
    where = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        *parents, key = (str(p) for p in error["loc"])
        known = _fields_at(RunConfig, parents)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        hint = ".".join([*parents, near[0]]) if near else "no key there"
        return f"unknown key {where!r}; the nearest known one is {hint!r}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message} (got {error['input']!r})" if where and not isinstance(error["input"], dict) else message


def _fields_at(model: type[BaseModel], parents: Sequence[str]) -> list[str]:
    names = iter(parents)
    for name in names:
        annotation = model.model_fields[name].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        model = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
        if get_origin(annotation) is dict:
            next(names, None)  # the user's own name of the section
    return list(model.model_fields)

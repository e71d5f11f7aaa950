"""Reads TOML with `extends`, or a dict of the same form, and `--set section.key=value` into one RunConfig, and writes
it as TOML. A name without a suffix, such as `tiny`, is that of a configuration in miles_like/demo_files.

A value or key that starts with `./` or `../` is a path relative to its file (from `--set`: to the working directory);
any other string is unchanged, so hub names need no escaping. An unknown key is an error that names the nearest known
one.
"""

from __future__ import annotations

import difflib
import errno
import math
import os
import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias, TypeVar, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError

from miles_like.config.run import RunConfig
from miles_like.config.sections.flat import fields
from miles_like.limits.regular_files import read_text

M = TypeVar("M", bound=BaseModel)
ConfigSource: TypeAlias = Path | Mapping[str, Any]
Override: TypeAlias = str | Mapping[str, Any]  # section.key=value, or a dict with sections or dotted keys
SHIPPED = Path(__file__).resolve().parents[1] / "demo_files"
CONFIG_BYTES = 1 << 20  # largest TOML file that is read
DEEPEST = 32  # levels of sections, or parts of a key
SET = "--set"  # source of the values of overrides
LARGEST, LONGEST_S = 1e30, 1e9  # largest number; longest duration in seconds
_LONG_KEY = re.compile(r"(?<![\w\"'-])(?:[\w\"'-]+[ \t]*\.[ \t]*){32,}")  # DEEPEST
_USER_OF_URL = re.compile(r"//[^/\s]*@")  # may hold a password
_DICT = "the configuration"  # names one that is a dict, in messages
_SIMILAR, _LISTED = 0.6, 3  # ratio of keys that differ by a typing error; keys that a message lists


def load_config(source: ConfigSource, overrides: Sequence[Override] = ()) -> RunConfig:
    """Read `source`, the files that it extends, and the overrides into one validated RunConfig.

    Raises ValueError with one line per problem: the problem, its key, and the nearest known key.
    """
    return checked(RunConfig, read_tree(source, overrides), origin_of(source))


def origin_of(source: ConfigSource) -> str:
    """What messages name a configuration by."""
    return str(source) if isinstance(source, Path) else _DICT


def read_tree(source: ConfigSource | None, overrides: Sequence[Override] = ()) -> dict[str, Any]:
    """`source`, if given, the files that it extends, and the overrides, not yet validated. Raises ValueError for a
    layer that names another model than the inherited `model.make` makes."""
    return read_layers(source, overrides).values


def read_layers(source: ConfigSource | None, overrides: Sequence[Override] = ()) -> Layers:
    """As `read_tree`, with the file that each value is from, or `SET`."""
    layers = Layers({}, {})
    if isinstance(source, Path):
        layers = _read(_located(source), seen=())
    elif source is not None:
        layers = _extended(_expanded(source), Path.cwd(), _DICT, seen=())
    trees = [_spelt_out(override_tree(given)) for given in overrides]
    given: dict[str, Any] = {}
    for tree in trees:
        _merge(given, tree, keep_drops=True)
    _check_model(layers.values, given, SET)
    for tree in trees:
        layers.add(_labelled(tree, SET))
    return Layers(_without_drops(layers.values, RunConfig), layers.sources)


def override_tree(given: Override) -> dict[str, Any]:
    """An override as a tree of sections. Raises ValueError for a text without a key or value."""
    if isinstance(given, str):
        return parse_override(given)
    return {key: _rooted(value, Path.cwd()) for key, value in _expanded(given).items()}


def _expanded(given: Mapping[str, Any]) -> dict[str, Any]:
    """A dict from Python with dotted keys as sections, tuples as lists, and paths as absolute ones."""
    tree: dict[str, Any] = {}
    for key, value in given.items():
        *parents, leaf = str(key).split(".")
        layer: dict[str, Any] = {leaf: _plain(value)}
        for name in reversed(parents):
            layer = {name: layer}
        _merge(tree, layer, keep_drops=True)
    return tree


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return os.path.abspath(value) if isinstance(value, Path) else value


def shipped_names() -> list[str]:
    """Names of the configurations that are installed with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def _located(path: Path) -> Path:
    """The shipped configuration that a name without a suffix means, where there is no such file."""
    shipped = SHIPPED / f"{path.name}.toml"
    return shipped if not path.suffix and not path.exists() and shipped.is_file() else path


def checked(model: type[M], tree: Mapping[str, Any], origin: str) -> M:
    """Raises ValueError as `load_config`; `origin`: where the tree is from, for messages."""
    try:
        _check_numbers(tree)
    except ValueError as e:
        raise ValueError(f"{origin}: {e}") from None
    try:
        return model.model_validate(tree)
    except ValidationError as e:
        raise ValueError(f"{origin}: " + "; ".join(_problem(err) for err in e.errors())) from None


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as TOML; reading it back gives an equal RunConfig."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def store_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration. Raises ValueError naming the file and the remedy where the disk is full."""
    try:
        path.write_text(dump_config(config), encoding="utf-8")
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(path.parent).free
        raise ValueError(
            f"{path}: no space left ({free:,} bytes are free): free some space, or choose a --run-dir on a larger disk"
        ) from None


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=value` as a tree; the value is parsed as TOML, and if that fails it is a plain string."""
    key, eq, value = text.partition("=")
    if not eq or not key.strip():
        raise ValueError(f"--set {text!r}: expected section.key=value, for example --set train.steps=10")
    try:
        parsed: Any = parse_toml(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        parsed = value
    except ValueError as e:
        raise ValueError(f"--set {text[:80]!r}: {e}") from None
    if isinstance(parsed, str):
        parsed = _rooted(parsed, Path.cwd())
    tree: dict[str, Any] = {}
    node = tree
    *parents, leaf = key.strip().split(".")
    for name in parents:
        node = node.setdefault(name, {})
    node[leaf] = parsed
    return tree


def parse_toml(text: str) -> dict[str, Any]:
    """`tomllib.loads` for untrusted text. Raises ValueError for invalid TOML (TOMLDecodeError is one), and for keys and
    values that are nested deeper than any configuration, on which tomllib takes minutes or raises RecursionError."""
    if (found := _LONG_KEY.search(text)) is not None:
        raise ValueError(f"the key {found[0][:40]!r}... has more than {DEEPEST} components")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("values are nested too deep") from None


def _check_numbers(value: Any, where: tuple[str, ...] = ()) -> None:
    """Raises ValueError for a whole number of more than 64 bits, a number above `LARGEST`, or a duration of more than
    `LONGEST_S` seconds, which operating system timers do not support."""
    if len(where) > DEEPEST:
        raise ValueError(f"{'.'.join(where[:8])}...: values are nested more than {DEEPEST} deep")
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        _check_numbers(inner, (*where, str(key)))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    name = ".".join(where)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{name}: expected an integer of at most 64 bits, got one of {value.bit_length()} bits")
    if not math.isfinite(value):  # rejected by the sections, except where a key allows it
        return
    if abs(value) > LARGEST or (name.endswith("_s") and abs(value) > LONGEST_S):
        most = LONGEST_S if name.endswith("_s") else LARGEST
        raise ValueError(f"{name}: {value:g} exceeds {most:g}, the largest value of a key")


def _read(path: Path, seen: tuple[Path, ...]) -> Layers:
    path = path.resolve()
    if path in seen:
        raise ValueError(f"{path}: `extends` is circular: {' -> '.join(p.name for p in (*seen, path))}")
    try:
        tree = parse_toml(read_text(path, CONFIG_BYTES))
    except FileNotFoundError:
        named = "" if path.suffix else f", or one of the shipped ones: {', '.join(shipped_names())}"
        raise ValueError(
            f"configuration file not found: {path}: pass the path of a TOML file as --config{named}"
        ) from None
    except ValueError as e:
        raise ValueError(f"{path} cannot be read as TOML: {e}") from None
    return _extended(tree, path.parent, str(path), (*seen, path))


def _extended(tree: dict[str, Any], root: Path, origin: str, seen: tuple[Path, ...]) -> Layers:
    """`tree`, whose paths are relative to `root`, over the files that it extends. seen: the files that extend it."""
    base = tree.pop("extends", [])
    tree = _spelt_out({k: _rooted(v, root) for k, v in tree.items()})
    names = [base] if isinstance(base, str) else base
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{origin}: `extends` must be a file name or a list of file names, not {base!r}")
    merged = Layers({}, {})
    for name in names:
        layer = _read(_located(root / name), seen)
        _check_model(merged.values, layer.values, name)
        merged.add(layer)
    _check_model(merged.values, tree, origin)
    merged.add(_labelled(tree, origin))
    return merged


def _spelt_out(tree: dict[str, Any]) -> dict[str, Any]:
    """`algorithm = "dapo"` is short for `algorithm.name = "dapo"` and keeps the section's other keys."""
    name = tree.get("algorithm")
    return tree | {"algorithm": {"name": name}} if isinstance(name, str) else tree


def _rooted(value: Any, root: Path) -> Any:
    if isinstance(value, dict):
        return {_rooted(k, root): _rooted(v, root) for k, v in value.items()}
    if isinstance(value, list):
        return [_rooted(v, root) for v in value]
    if isinstance(value, str) and value.startswith(("./", "../")):
        return os.path.abspath(root / value)  # a symbolic link stays one: the Python of a virtual environment is one
    return value


@dataclass
class Layers:
    """Values of several files, later ones over earlier ones, and a tree of the same keys with the source of each."""

    values: dict[str, Any]
    sources: dict[str, Any]

    def add(self, layer: Layers) -> None:
        _merge(self.values, layer.values, self.sources, layer.sources)


def _labelled(tree: dict[str, Any], source: str) -> Layers:
    def label(value: Any) -> Any:
        return {key: label(one) for key, one in value.items()} if isinstance(value, Mapping) else source

    return Layers(tree, label(tree))


def _merge(
    into: dict[str, Any],
    new: Mapping[str, Any],
    sources: dict[str, Any] | None = None,
    new_sources: Mapping[str, Any] | None = None,
    *,
    keep_drops: bool = False,
) -> None:
    """Merge `new` into `into`, section by section, and their sources likewise. `false` for a section of `into` removes
    it; with `keep_drops` the `false` replaces it."""
    sources, new_sources = {} if sources is None else sources, new_sources or {}
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value, sources.get(key), new_sources.get(key), keep_drops=keep_drops)
        elif value is False and isinstance(into.get(key), dict) and not keep_drops:
            del into[key]
            sources.pop(key, None)
        else:
            into[key] = _copied(value)
            sources[key] = _copied(new_sources.get(key))


def _copied(value: Any) -> Any:
    return {key: _copied(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def _without_drops(tree: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Without the sections that are `false` though no extended file had them, and without optional keys that are."""
    out = dict(tree)
    for key, value in tree.items():
        field = fields(model).get(key)
        section = None if field is None else section_of(field.annotation)
        if section is None:
            if value is False and field is not None and _is_optional(field.annotation):
                del out[key]
            continue
        of, named = section
        if value is False:
            del out[key]
        elif isinstance(value, dict) and named:
            entries = {name: one for name, one in value.items() if one is not False}
            if of is not None:
                entries = {n: _without_drops(one, of) if isinstance(one, dict) else one for n, one in entries.items()}
            out[key] = entries
        elif isinstance(value, dict) and of is not None:
            out[key] = _without_drops(value, of)
    return out


def _is_optional(annotation: Any) -> bool:
    """Whether a key can be unset and `false` is no value of it."""
    kinds = get_args(annotation)
    return NoneType in kinds and bool not in kinds


def section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool] | None:
    """(section model, whether the field is a table name -> section) of a field's type; None for a plain value."""
    for option in (annotation, *(get_args(annotation) if get_origin(annotation) is not dict else ())):
        if get_origin(option) is dict:
            of = get_args(option)[1]
            return (of if isinstance(of, type) and issubclass(of, BaseModel) else None), True
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option, False
    return None


def _check_model(inherited: Mapping[str, Any], layer: Mapping[str, Any], where: str) -> None:
    """Raises ValueError if `layer` sets model.path and inherits `model.make`, which would ignore the path. A layer that
    also sets model.make.config gives the new model its name."""
    before, own = inherited.get("model"), layer.get("model")
    if not (isinstance(before, Mapping) and isinstance(own, Mapping) and isinstance(before.get("make"), Mapping)):
        return
    make = own.get("make", {})
    if own.get("path", before.get("path")) == before.get("path") or make is False:
        return
    if not (isinstance(make, Mapping) and "config" in make):
        raise ValueError(
            f"{where}: model.path = {own['path']!r} does not belong to the inherited [model.make], which makes "
            f"{before.get('path')!r} from {before['make'].get('config')}: set model.make = false to load "
            "model.path, or set model.make.config too to make a different model with that name"
        )


def _problem(error: Mapping[str, Any]) -> str:
    where = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        return unknown_key([str(p) for p in error["loc"]])
    if error["type"] == "missing":
        return f"{where} is missing: set it"
    message = _USER_OF_URL.sub("//...@", str(error["msg"]).removeprefix("Value error, "))
    got = _USER_OF_URL.sub("//...@", repr(error["input"]))
    if not where or not isinstance(error["input"], dict):
        return f"{where}: {message} (got {got})" if where else message
    return message if where in message else f"{where}: {message}"  # a section that a user names cannot name itself


def unknown_key(loc: Sequence[str]) -> str:
    """The message about a key that no section has."""
    near = _nearest(loc)
    ones = "one is" if len(near) == 1 else "ones are"
    hint = ", ".join(map(repr, near)) or "'no key there'"
    return f"unknown key {'.'.join(loc)!r}; the nearest known {ones} {hint}"


def _nearest(loc: Sequence[str]) -> list[str]:
    """Known keys that an unknown key may mean: a similar one in its section, keys with the same last component in other
    sections, else one whose last component is similar, else the most similar one."""
    *parents, key = loc
    every, beside = dotted_keys(RunConfig), _fields_at(RunConfig, parents)
    close = [".".join([*parents, n]) for n in difflib.get_close_matches(key, beside, n=1, cutoff=_SIMILAR)]
    elsewhere = sorted((k for k in every if k.rpartition(".")[2] == key), key=lambda k: k.count("."))
    if found := [*elsewhere[: _LISTED - len(close)], *close]:
        return found
    likely = difflib.get_close_matches(key, {k.rpartition(".")[2] for k in every}, n=1, cutoff=_SIMILAR)
    section = ".".join([*parents, ""])
    alike = sorted((k for k in every if [k.rpartition(".")[2]] == likely), key=lambda k: not k.startswith(section))
    among = [".".join([*parents, n]) for n in beside] or every
    return alike[:1] or difflib.get_close_matches(".".join(loc), among, n=1, cutoff=0.0)


def dotted_keys(model: type[BaseModel], before: str = "") -> list[str]:
    """Dotted names of all keys that are not sections; NAME stands for a user-defined section name."""
    out = []
    for name, field in fields(model).items():
        of, named = section_of(field.annotation) or (None, False)
        if of is None:
            out.append(f"{before}{name}")
        else:
            out += dotted_keys(of, f"{before}{name}.NAME." if named else f"{before}{name}.")
    return out


def _fields_at(model: type[BaseModel], parents: Sequence[str]) -> list[str]:
    """Keys of the section `parents`; []: there is no such section."""
    names = iter(parents)
    for name in names:
        if (field := fields(model).get(name)) is None or (section := section_of(field.annotation)) is None:
            return []
        of, named = section
        if of is None:
            return []
        model = of
        if named:
            next(names, None)  # the user-defined section name
    return list(fields(model))

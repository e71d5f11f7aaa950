"""Describes the keys of a configuration, from the classes of the sections: type, range, default and meaning.

A key's meaning is the comment beside its field, or above it. Where several parts of a section have the key
(`miles_like/config/sections/flat.py`), its row names the choices that it belongs to.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as at
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from miles_like.config.load import section_of
from miles_like.config.sections.flat import FlatSection, Part, fields, parts_of, values

LONGEST = 60  # characters of a default that are shown


@dataclass(frozen=True)
class Row:
    """One key of one section, or of one part of it."""

    key: str
    type: str  # with its range
    default: str
    meaning: str
    choice: str = ""  # the value of another key with which the part is chosen; "": always


def sections(model: type[BaseModel]) -> dict[str, tuple[type[BaseModel], bool]]:
    """key -> (section, whether the user names several of them) of the keys that are sections."""
    found = {key: section_of(field.annotation) or (None, False) for key, field in fields(model).items()}
    return {key: (of, named) for key, (of, named) in found.items() if of is not None}


def about(model: type[BaseModel]) -> str:
    """The first paragraph of the class's docstring."""
    text = inspect.cleandoc(model.__dict__.get("__doc__") or "")
    return " ".join(text.partition("\n\n")[0].split())


@cache
def rows(model: type[BaseModel]) -> tuple[Row, ...]:
    """A row for each key of the text, in its order."""
    found: dict[str, list[Row]] = {}
    for row in _part_rows(model, model):
        found.setdefault(row.key, []).append(row)
    return tuple(_one(found[key]) for key in fields(model))


def _one(rows: list[Row]) -> Row:
    """The rows of one key in several parts as one row."""
    of: dict[str, list[str]] = {}
    meanings: dict[str, list[str]] = {}
    for row in rows:
        of.setdefault(row.default, []).append(row.choice)
        if row.meaning:
            meanings.setdefault(row.meaning, []).append(row.choice)
    default = "; ".join(f"{default} with {_joined(choices)}" for default, choices in of.items())
    meaning = "; ".join(
        f"{text} ({_joined(choices)})" if i and any(choices) else text
        for i, (text, choices) in enumerate(meanings.items())
    )
    choices = list(dict.fromkeys(row.choice for row in rows))
    types = ", ".join(dict.fromkeys(word for row in rows for word in row.type.split(", ")))
    return Row(
        rows[0].key,
        types,
        default if len(of) > 1 else rows[0].default,
        f"with {_joined(choices)}: {meaning}" if all(choices) else meaning,
    )


def _joined(choices: list[str]) -> str:
    """[`loss` = `a`, `loss` = `b`] -> `loss` = `a`, `b`."""
    by: dict[str, list[str]] = {}
    for choice in dict.fromkeys(choices):
        key, _, value = choice.partition(" = ")
        by.setdefault(key, []).append(value)
    return ", or ".join(f"{key} = {', '.join(v)}" if any(v) else key for key, v in by.items())


def _part_rows(model: type[BaseModel], section: type[BaseModel], choice: str = "") -> Iterator[Row]:
    """Rows of `model`, a section or a part of `section`."""
    for name, field in model.model_fields.items():
        parts = parts_of(model).get(name)
        if parts is None:
            yield Row(name, _type(field), _default(field, section), comment(model, name), choice)
            continue
        for part in parts:
            for row in _part_rows(part, section, _choice(part, parts) or choice):
                if row.key == part.chosen_by:
                    kind = row.type if part.names() else "an import path"
                    kind = f'`"off"`, {kind}' if part.switch == row.key else kind
                    meaning = comment(model, name) or row.meaning
                    yield Row(row.key, kind, _chosen(section, field, parts), meaning, choice)
                elif row.key == part.switch:
                    kind, default = row.type.replace(" > 0", " >= 0"), _shown(_absent(section, row.key))
                    yield Row(row.key, kind, default, row.meaning, choice)
                else:
                    yield row


def _choice(part: type[Part], parts: tuple[type[Part], ...]) -> str:
    """With which value of another key `part` is chosen of `parts`; "" where the key's own row says it."""
    if len(parts) == 1:
        return "" if part.switch == part.chosen_by else f"`{part.switch}` above 0"
    with_keys = [one for one in parts if set(one.model_fields) - {one.chosen_by}]
    if with_keys == [part]:
        return "" if len(part.names()) > 1 else f"`{part.chosen_by}` = `{part.names()[0]}`"
    alike = [one for one in parts if one is not part and one.names() == part.names()]
    needs = [key for key, field in part.model_fields.items() if field.is_required() and key != part.chosen_by]
    names = " or ".join(f"`{name}`" for name in part.names()) or "an import path"
    return f"`{part.chosen_by}` = {names}" + (f" with `{needs[0]}`" if alike else "")


def _absent(section: type[BaseModel], key: str) -> object:
    return section.absent.get(key) if issubclass(section, FlatSection) else None


def _chosen(section: type[BaseModel], field: FieldInfo, parts: tuple[type[Part], ...]) -> str:
    """The default of the key that chooses one of the parts."""
    by = parts[0].chosen_by
    if not field.is_required() and field.default is not None:
        return _shown(values(field.default)[by])
    return _shown(_absent(section, by) if parts[0].switch == by else parts[0].names()[0])


def _default(field: FieldInfo, section: type[BaseModel]) -> str:
    if field.is_required():
        implied = issubclass(section, FlatSection) and "implied" in section.__dict__
        return "by the kind" if implied else "required"
    return _shown(field.get_default(call_default_factory=True))


def _shown(value: object) -> str:
    """As TOML has it."""
    if value is None:
        return "not set"
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, tuple | list):
        return f"`[{', '.join(_plain(one) for one in value)}]`"
    if isinstance(value, Mapping):
        return f"`{{{', '.join(f'{key} = {_plain(one)}' for key, one in value.items())}}}`"
    return f"`{_plain(value)}`"


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return str(value)
    first, more, _ = value.partition("\n")
    short = first if len(first) <= LONGEST else first[:LONGEST]
    return f'"{short}{"..." if more or short != first else ""}"'


def _type(field: FieldInfo) -> str:
    signs = {at.Ge: ">=", at.Gt: ">", at.Le: "<=", at.Lt: "<"}
    bounds = [f"{signs[type(one)]} {next(iter(vars_of(one)))}" for one in field.metadata if type(one) in signs]
    return " ".join([_type_name(field.annotation), " and ".join(bounds)]).strip()


def vars_of(bound: Any) -> tuple[object, ...]:
    return tuple(getattr(bound, name) for name in ("ge", "gt", "le", "lt") if hasattr(bound, name))


def _type_name(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(_type_name(one) for one in arguments if one is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{_plain(one)}`" for one in arguments)
    if origin is dict:
        return f"table of {_type_name(arguments[1])}"
    if origin is tuple:
        many = "list of" if arguments[-1] is Ellipsis else f"list of {len(arguments)}"
        return f"{many} {_type_name(arguments[0])}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f'`"{one.value}"`' for one in kind)
    return {str: "text", int: "integer", float: "number", bool: "true or false"}.get(kind, "any value")


def comment(model: type[BaseModel], name: str) -> str:
    """The comment beside or above a field, in the class that defines it; "": none."""
    owner = next(one for one in model.__mro__ if name in inspect.get_annotations(one))
    return _comments(owner).get(name, "")


@cache
def _comments(owner: type) -> dict[str, str]:
    """field -> its comment: full lines directly above it, then what follows it on its lines."""
    source = textwrap.dedent(inspect.getsource(owner))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = {t.start: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    full = {line: text for (line, column), text in texts.items() if not source.splitlines()[line - 1][:column].strip()}
    beside = {line: text for (line, _), text in texts.items() if line not in full}
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for one in body.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            first = one.lineno
            while first - 1 in full:
                first -= 1
            lines = [full[line] for line in range(first, one.lineno)]
            lines += [beside[line] for line in range(one.lineno, (one.end_lineno or 0) + 1) if line in beside]
            found[one.target.id] = re.sub(r"\bNone(?=[:,])", "not set", " ".join(lines))
    return found

"""What a key of the configuration means, and which modules read it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import BaseModel

import megatron_bridge
import miles_like
import rollout
from miles_like.config.keys import Row, about, rows, sections
from miles_like.config.load import dotted_keys, unknown_key
from miles_like.config.run import RunConfig
from miles_like.config.sections.flat import FlatSection, parts_of

PACKAGES = (miles_like, megatron_bridge, rollout)
NAME = "NAME"  # stands for a name that the user gives a section


@dataclass(frozen=True, slots=True)
class ExplainedKey:
    name: str  # dotted
    row: Row
    section: type[BaseModel]

    @property
    def readers(self) -> list[str]:
        """Source files that read the key, relative to the packages' directory, sorted."""
        return sorted(_readers(self.section, self.name.split(".")))


@dataclass(frozen=True, slots=True)
class ExplainedSection:
    name: str
    about: str  # "": its class has no docstring
    keys: tuple[Row, ...]
    sections: tuple[str, ...]  # dotted, of those in it


def explain(key: str) -> ExplainedKey | ExplainedSection:
    """A dotted key or section; a key without its section if one section alone has it. Raises ValueError naming the
    nearest known keys."""
    words = key.split(".")
    if len(words) == 1 and key not in RunConfig.model_fields:
        every = [name for name in dotted_keys(RunConfig) if name.rpartition(".")[2] == key]
        if len(every) != 1:
            raise ValueError(unknown_key(words))
        words = every[0].split(".")
    return _walk(words)


def _walk(words: Sequence[str]) -> ExplainedKey | ExplainedSection:
    section: type[BaseModel] = RunConfig
    path: list[str] = []
    rest = list(words)
    while rest:
        word, inner = rest.pop(0), sections(section)
        if word not in inner:
            return _key(section, path, word, rest)
        section, named = inner[word]
        path.append(word)
        if named:
            path.append(NAME)
            if rest:
                rest.pop(0)
    at = ".".join(path)
    own = sections(section)
    inside = tuple(f"{at}.{key}{f'.{NAME}' if named else ''}" for key, (_, named) in own.items())
    return ExplainedSection(at, about(section), tuple(row for row in rows(section) if row.key not in own), inside)


def _key(section: type[BaseModel], path: list[str], word: str, rest: Sequence[str]) -> ExplainedKey:
    """rest: an entry of a key that is a table, such as rollout.env.HOME."""
    for row in rows(section):
        if row.key == word and (not rest or row.type.startswith("table")):
            return ExplainedKey(".".join([*path, word]), row, section)
    raise ValueError(unknown_key([*path, word, *rest] if rest else [*path, word]))


def _readers(section: type[BaseModel], words: Sequence[str]) -> Iterator[str]:
    """Files with `section.key`, or with `.key` or `key=` and the name of a class that has the key."""
    *before, key = words
    parents = [next((word for word in reversed(before) if word != NAME), "config")]
    parents += ["parts"] if issubclass(section, FlatSection) else []
    chain = re.compile(rf"\b({'|'.join(parents)})\.{key}\b")
    read = re.compile(rf"\.{key}\b|\b{key}=")
    classes = re.compile(rf"\b({'|'.join(_owners(section, key))})\b")
    for name, text in _sources().items():
        if key in text and (chain.search(text) or (read.search(text) and classes.search(text))):
            yield name


def _owners(model: type[BaseModel], key: str) -> set[str]:
    """Names of the section's class and of its parts and base classes that have the key."""
    found = {model.__name__}
    for parts in parts_of(model).values():
        for part in parts:
            if key in part.model_fields or any(_owners(part, key) - {part.__name__}):
                found |= _owners(part, key)
    return found


@cache
def _sources() -> dict[str, str]:
    """Python files of the packages -> their text, as `_code` leaves it."""
    found = {}
    for package in PACKAGES:
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            if path != Path(__file__):
                found[path.relative_to(root.parent).as_posix()] = _code(path.read_text(encoding="utf-8"))
    return found


def _code(text: str) -> str:
    """Without comments, docstrings and strings, in which a key is named but not read."""
    return re.sub(r'"""(?s:.*?)"""|#[^\n]*|"(?:\\.|[^"\\\n])*"', "", text)

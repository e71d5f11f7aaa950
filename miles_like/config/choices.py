"""Flat sections in which the value of one key decides which other keys are read. Torch-free.

A section is written flat (`algorithm.loss = "sapo"` beside `algorithm.tau_pos = 1.0`). Its table of choices lists the
keys that each value reads, with their defaults: they fill in what is not given, and every other key is refused. `part`
gives the keys of one value as a typed section.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from miles_like.section import Section

P = TypeVar("P", bound=Section)
Keys = Mapping[str, object]  # key -> its default, or its value


@dataclass(frozen=True)
class Choice:
    key: str  # whose value chooses; dotted for a key of another section
    reads: Mapping[str, Keys] = field(default_factory=dict)  # its value -> the keys that are read with it
    otherwise: Keys = field(default_factory=dict)  # with any value that is not in `reads`, None or 0

    def of(self, value: object) -> Keys:
        return self.reads[value] if isinstance(value, str) and value in self.reads else self.otherwise if value else {}

    def decides(self, key: str) -> bool:
        return any(key in read for read in (*self.reads.values(), self.otherwise))

    def remedy(self, key: str, name: str) -> str:
        values = " or ".join(repr(value) for value, read in self.reads.items() if key in read)
        return f"remove it, or set {name} = {values}" if values else f"remove it, or set {name} to another value"


class Choices:
    """The choices of one section. A choice whose own key depends on another choice comes after that one."""

    def __init__(self, section: str, *choices: Choice) -> None:
        self.section, self.choices = section, choices

    def read(self, given: Keys) -> dict[str, object]:
        """The keys that are read with the values `given`, among the keys of all choices, and their defaults."""
        out: dict[str, object] = {}
        for choice in self.choices:
            if self._active(choice, out):
                value = given.get(choice.key)
                out |= choice.of(out.get(choice.key) if value is None else value)
        return out

    def check(self, section: Section, others: Keys | None = None) -> None:
        """Raises ValueError for a key that is set but not read. others: keys of other sections -> values."""
        values = {**vars(section), **(others or {})}
        read = self.read(values)
        for key, value in changed(section):
            if key not in read and self._decided(key):
                choice, left_out = self._deciding(key, read)
                name = choice.key if "." in choice.key else f"{self.section}.{choice.key}"
                # of a value that is a whole section only the key is shown
                shown = f"{self.section}.{key}" + (f" = {value!r}" if isinstance(value, str | int | float) else "")
                why = f"{name} = {values[choice.key]!r}: {choice.remedy(left_out, name)}"
                raise ValueError(f"{shown} does nothing with {why}")

    def _decided(self, key: str) -> bool:
        return any(choice.decides(key) for choice in self.choices)

    def _active(self, choice: Choice, read: Collection[str]) -> bool:
        return choice.key in read or not self._decided(choice.key)

    def _deciding(self, key: str, read: Collection[str]) -> tuple[Choice, str]:
        """The choice because of which `key` is not read, and the key that it leaves out: `key`, or that of a choice
        which decides on it."""
        choice = next(c for c in self.choices if c.decides(key))
        return (choice, key) if self._active(choice, read) else self._deciding(choice.key, read)


def keys(*names: str) -> Keys:
    """Keys whose default is None, or that are not filled in."""
    return dict.fromkeys(names)


def keys_of(part: type[Section]) -> Keys:
    return {key: one.get_default(call_default_factory=True) for key, one in part.model_fields.items()}


def part(section: Section, kind: type[P]) -> P:
    """The keys of `kind` in a flat section, as a section of that kind."""
    return kind.model_validate({key: getattr(section, key) for key in kind.model_fields})


def changed(section: Section) -> list[tuple[str, object]]:
    """(key, value) of the keys whose value is not their default."""
    usual = keys_of(type(section))
    return [(key, value) for key, value in vars(section).items() if value != usual[key]]

"""What the keys of another project's configuration become: keys of this project, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import BaseModel

from miles_like.config.foreign.shell import UNRESOLVED
from miles_like.config.keys import rows, sections
from miles_like.config.run import RunConfig

Value = Any  # of TOML: text, number, truth value, list


@dataclass(frozen=True, slots=True)
class Became:
    """Keys of theirs that became a key of ours."""

    theirs: str
    ours: str
    value: Value
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One key of theirs that is one key of ours."""

    ours: str
    convert: Callable[[Any], Value] = lambda value: value
    """Raises ValueError with the reason for a value that ours does not have. None: ours is left out."""
    default: Any = None
    """What theirs is if it is not given, where ours has another default."""


@dataclass(slots=True)
class Translation:
    """The keys of one file. Each of them is mapped or left with a reason."""

    given: Mapping[str, Any]
    ours: dict[str, Value] = field(default_factory=dict)
    rows: list[Became] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    to_do: list[str] = field(default_factory=list)
    """What the user must decide before a run."""
    _used: set[str] = field(default_factory=set)

    def get(self, theirs: str, otherwise: Any = None) -> Any:
        """The value of a key, which is then used; one with an unresolved shell variable counts as not given. Raises
        ValueError for text where `otherwise` is a number."""
        value = self.given.get(theirs)
        if any(
            isinstance(one, str) and UNRESOLVED.search(one) for one in (value if isinstance(value, list) else [value])
        ):
            self.leave(theirs, f"its value {value!r} is only known when the script runs")
            return otherwise
        if theirs in self.given:
            self._used.add(theirs)
        if isinstance(value, str) and isinstance(otherwise, int | float):
            raise ValueError(f"{theirs} = {value!r} is not a number")
        return otherwise if value is None else value

    def put(self, theirs: str | Iterable[str], ours: str, value: Value, remark: str = "") -> None:
        """Set a key of ours, from one or several of theirs; those that are not given are not named. Raises ValueError
        for a number that is none."""
        names = [theirs] if isinstance(theirs, str) else list(theirs)
        if ours in _numbers() and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{names[0]} = {value!r}: {ours} is a number")
        self._used.update(name for name in names if name in self.given)
        named = [name for name in names if name in self.given] or [f"{names[0]} (default)"]
        self.ours[ours] = value
        self.rows.append(Became(" + ".join(named), ours, value, remark))

    def leave(self, theirs: str, why: str) -> None:
        if theirs in self.given:
            self._used.add(theirs)
            self.left.setdefault(theirs, why)

    def drop(self, ours: str) -> None:
        """Take back a key that has no effect beside the others; the keys of theirs are left with that reason."""
        self.ours.pop(ours, None)
        for row in [row for row in self.rows if row.ours == ours]:
            self.rows.remove(row)
            self.leave(row.theirs, f"{ours} has no effect with the other keys")

    def apply(self, rules: Mapping[str, Rule]) -> None:
        for theirs, rule in rules.items():
            value = self.get(theirs, rule.default)
            if value is None:
                continue
            if isinstance(value, str) and rule.ours in _numbers():
                raise ValueError(f"{theirs} = {value!r}: {rule.ours} is a number")
            try:
                converted = rule.convert(value)
            except ValueError as e:
                self.leave(theirs, str(e))
                self.to_do.append(f"{theirs} = {value!r}: {e}")
                continue
            if converted is not None:
                self.put(theirs, rule.ours, converted)

    def finish(self, reasons: Mapping[str, str]) -> None:
        """Give every key that became nothing a reason: that of the longest prefix in `reasons`."""
        mapped = {name for row in self.rows for name in row.theirs.split(" + ")}
        for theirs, value in self.given.items():
            if value is None or theirs in mapped or theirs in self.left:
                continue
            if theirs in self._used:
                self.left[theirs] = "this value needs no key"
                continue
            prefix = max((p for p in reasons if theirs.startswith(p)), key=len, default=None)
            self.left[theirs] = "no key corresponds" if prefix is None else reasons[prefix]

    @property
    def tree(self) -> dict[str, Any]:
        """Ours, as a tree of sections."""
        out: dict[str, Any] = {}
        for name, value in self.ours.items():
            node = out
            *parents, leaf = name.split(".")
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
        return out


@cache
def _numbers(section: type[BaseModel] = RunConfig, before: str = "") -> frozenset[str]:
    """Keys of ours that are numbers."""
    inner = sections(section)
    own = {f"{before}{row.key}" for row in rows(section) if row.type.startswith(("integer", "number"))}
    return frozenset(own).union(*(_numbers(of, f"{before}{key}.") for key, (of, named) in inner.items() if not named))


def one_of(names: Mapping[Any, Value], what: str = "") -> Callable[[Any], Value]:
    """A conversion of names. Raises ValueError for one that ours does not have."""

    def convert(value: Any) -> Value:
        if value not in names:
            known = ", ".join(str(name) for name in names)
            raise ValueError(f"it has no counterpart{f' {what}' if what else ''}; supported values are: {known}")
        return names[value]

    return convert


def only(wanted: Any, why: str) -> Callable[[Any], None]:
    """A key that has no counterpart and needs none at one value. Raises ValueError at another one."""

    def convert(value: Any) -> None:
        if value != wanted:
            raise ValueError(why)

    return convert


def positive(value: Any) -> Value:
    """None for a number that is 0 or less, with which other projects mean "never" or "not set"."""
    return value if value > 0 else None


def never_below_0(value: Any) -> Value:
    """0 for a negative number, with which other projects mean "never"."""
    return max(value, 0)


def path(value: Any) -> Value:
    """A local path: relative ones are written as relative to the configuration."""
    text = str(value)
    if text.startswith(("/", "~", "./", "../")) or "://" in text or not text.endswith(DATA_FILES):
        return text
    return f"./{text}"


DATA_FILES = (".jsonl", ".json", ".parquet", ".py")

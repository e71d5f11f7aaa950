"""Sections that are written flat and held as typed parts. Torch-free.

A file has `algorithm.loss = "sapo"` beside `algorithm.tau_pos = 1.0`; in memory both are one part, `Sapo(tau_pos=1.0)`.
A part has exactly the keys that do something with it, so one rule refuses every other key of the section.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SerializationInfo, ValidationError, model_serializer, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails

from miles_like.section import Section


class Part(Section):
    """A value of a field of a `FlatSection`, or of another part. Where a field has several parts, the first one that
    fits is the default."""

    chosen_by: ClassVar[str] = ""  # the discriminator: a Literal, or a string that is an import path
    switch: ClassVar[str] = ""  # the field is None while this number is 0, or this text "off"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Values of the discriminator; (): an import path."""
        literal = cls.model_fields[cls.chosen_by].annotation if cls.chosen_by else None
        return get_args(literal) if get_origin(literal) is Literal else ()


class FlatSection(Section):
    """A section whose keys and its parts' keys are one table. Raises ValueError for a key of a part that is not chosen,
    unless it has the value of `absent`: the value under which the text lists such a key."""

    section: ClassVar[str]  # its name in messages
    order: ClassVar[tuple[str, ...]] = ()  # of the keys in the text; (): that of the fields
    absent: ClassVar[Mapping[str, object]] = {}  # key -> its value in the text if no part has it; others: None

    @classmethod
    def implied(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        """Defaults that depend on other keys; one that no chosen part has is ignored."""
        return {}

    @model_validator(mode="before")
    @classmethod
    def parts_of_the_text(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = {key: value for key, value in given.items() if value is not None}
        _check_given(cls, given)
        text, taken = {**cls.implied(given), **given}, set[str]()
        out = _nested(cls, cls, text, taken)
        for key in [key for key in given if key not in taken]:
            if given[key] != cls.absent.get(key):
                raise ValueError(_refusal(cls, cls, key, text))
        return out

    @model_serializer
    def text(self, info: SerializationInfo) -> dict[str, Any]:
        return {key: value for key, value in values(self).items() if value is not None or not info.exclude_none}


@cache
def parts_of(model: type[BaseModel]) -> dict[str, tuple[type[Part], ...]]:
    """field -> the parts that it can have, for fields that have parts."""
    found = {name: tuple(_parts(one.annotation)) for name, one in model.model_fields.items()}
    return {name: parts for name, parts in found.items() if parts}


@cache
def fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """key of the text -> its field; the first one where several parts have the key."""
    out: dict[str, FieldInfo] = {}
    for name, one in model.model_fields.items():
        parts = parts_of(model).get(name)
        for key, inner in [(name, one)] if parts is None else [i for p in parts for i in fields(p).items()]:
            out.setdefault(key, inner)
    order = getattr(model, "order", ()) or out
    return {key: out[key] for key in order}


def values(section: BaseModel) -> dict[str, object]:
    """key of the text -> value, in the text's order."""
    out: dict[str, object] = {}
    if isinstance(section, FlatSection):
        out = {key: section.absent.get(key) for key in fields(type(section))}
    for name, value in vars(section).items():
        if name not in parts_of(type(section)):
            out[name] = value
        elif value is not None:
            out |= values(value)
    return out


def changed(section: Section) -> list[tuple[str, object]]:
    """(key, value) of the keys whose value is not their default."""
    usual = defaults(type(section))
    return [(key, value) for key, value in vars(section).items() if value != usual[key]]


def defaults(model: type[BaseModel]) -> dict[str, object]:
    return {key: one.get_default(call_default_factory=True) for key, one in model.model_fields.items()}


def unknown(key: str, value: object, known: Mapping[str, object] | tuple[str, ...]) -> str:
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.0)
    return f"unknown {key} {value!r}: did you mean {near[0]!r}? Known: {sorted(known)}"


def _parts(annotation: object) -> Iterator[type[Part]]:
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation
    for argument in get_args(annotation):
        yield from _parts(argument)


def choosers(cls: type[FlatSection]) -> set[str]:
    """Keys whose values choose parts."""
    return {key for part in _parts_in(cls) for key in (part.chosen_by, part.switch)} - {""}


@cache
def _parts_in(model: type[BaseModel]) -> tuple[type[Part], ...]:
    """All parts of `model`, and theirs."""
    own = [part for parts in parts_of(model).values() for part in parts]
    return (*own, *(inner for part in own for inner in _parts_in(part)))


@cache
def _texts(cls: type[FlatSection]) -> dict[str, tuple[str, ...]]:
    """key of a part -> the texts that it can have; without the keys that can have another value."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for part in _parts_in(cls):
        for key in [key for key in part.model_fields if key not in parts_of(part)]:
            found.setdefault(key, []).append(_literals(part.model_fields[key].annotation))
        if part.switch and part.switch == part.chosen_by:
            found[part.switch].insert(0, ("off",))
    return {key: tuple(dict.fromkeys(sum(every, ()))) for key, every in found.items() if all(every)}


def _literals(annotation: object) -> tuple[str, ...]:
    """Texts of a Literal, which may be optional; (): of another type."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    every = [get_args(one) if get_origin(one) is Literal else () for one in options if one is not NoneType]
    return sum(every, ()) if all(every) else ()


def _check_given(cls: type[FlatSection], given: Mapping[str, object]) -> None:
    """Raises ValidationError for unknown keys, and ValueError for a text that its key cannot have in any part, or a
    switch below 0: a typing error is reported as one, also where its part is not chosen."""
    if strange := [key for key in given if key not in fields(cls)]:
        errors = [InitErrorDetails(type="extra_forbidden", loc=(key,), input=given[key]) for key in strange]
        raise ValidationError.from_exception_data(cls.__name__, errors)
    numbers = {part.switch for part in _parts_in(cls) if part.switch and part.switch != part.chosen_by}
    for key, value in given.items():
        if (known := _texts(cls).get(key)) and value not in known:
            raise ValueError(unknown(f"{cls.section}.{key}", value, known))
        if key in numbers and isinstance(value, int | float) and value < 0:
            raise ValueError(f"{cls.section}.{key} = {value} is negative: set it to 0 (off) or more")


def _nested(
    cls: type[FlatSection], model: type[BaseModel], text: Mapping[str, object], taken: set[str]
) -> dict[str, object]:
    """The fields of `model`, their parts validated. taken: gets the keys that were read."""
    out: dict[str, object] = {}
    for name in model.model_fields:
        if (parts := parts_of(model).get(name)) is None:
            if name in text:
                out[name] = text[name]
                taken.add(name)
            continue
        taken.add(parts[0].switch)
        part = _chosen(cls, parts, text)
        out[name] = None if part is None else part.model_validate(_nested(cls, part, text, taken))
    return out


def _chosen(cls: type[FlatSection], parts: tuple[type[Part], ...], text: Mapping[str, object]) -> type[Part] | None:
    """None: switched off. Raises ValueError for an unknown part, and for keys that choose none or several."""
    first, key = parts[0], parts[0].chosen_by
    if first.switch and text.get(first.switch) in (None, "off" if first.switch == key else 0):
        return None
    if not key:
        return first
    value = text.get(key, next(iter(first.names()), None))
    fitting = [part for part in parts if value in part.names()]
    if not fitting and isinstance(value, str) and ":" in value:
        fitting = [part for part in parts if not part.names()]
    if not fitting:
        own = "" if all(part.names() for part in parts) else " (or pkg.module:name of a custom one)"
        raise ValueError(unknown(f"{cls.section}.{key}", value, names_of(parts)) + own)
    if len(fitting) == 1:
        missing = [name for name in _required(fitting[0]) if name not in text]
        if missing and missing[0] != key:
            how = fitting[0].model_fields[missing[0]].description
            to = f" to {how}" if how else ""
            raise ValueError(f"{cls.section}.{key} = {value!r} needs {cls.section}.{missing[0]}: set it{to}")
        return fitting[0]
    required = {name: part for part in fitting for name in _required(part)}
    if len(given := [name for name in required if name in text]) != 1:
        raise ValueError(
            f"{cls.section}.{key} = {value!r} with {' and '.join(given) or 'no key'}: set exactly one of "
            f"{', '.join(required)}"
        )
    return required[given[0]]


def names_of(parts: Iterable[type[Part]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in parts for name in part.names()))


def _refusal(cls: type[FlatSection], model: type[BaseModel], key: str, text: Mapping[str, object]) -> str:
    """Which parts of `model` have `key`, and which one is chosen instead. A value that is a section is not shown."""
    value, kind = text[key], fields(cls)[key].annotation
    if isinstance(value, int) and float in (kind, *get_args(kind)):
        value = float(value)
    shown = f"{cls.section}.{key}" + (f" = {value!r}" if isinstance(value, str | int | float) else "")
    parts, owners = next(
        (parts, owners)
        for parts in parts_of(model).values()
        if (owners := [part for part in parts if key in fields(part)])
    )
    chosen = _chosen(cls, parts, text)
    if chosen in owners:
        return _refusal(cls, chosen, key, text)
    by = parts[0].switch if chosen is None else parts[0].chosen_by
    now = text.get(by, cls.absent.get(by) if chosen is None else parts[0].names()[0])
    of, its, switch = f"= {' or '.join(map(repr, names_of(owners)))}", repr(now), f"{cls.section}.{by}"
    remedy = f"set {switch} {of}" if len(names_of(owners)) == 1 else f"set {switch} to one of those"
    if by != parts[0].chosen_by:
        of, remedy = "above 0", f"set {switch} above 0"
    elif chosen is not None and now in owners[0].names():  # parts of one name, which have different keys
        needs, has = (" and ".join(_required(part)) for part in (owners[0], chosen))
        of, its, remedy = f"= {now!r} with {needs}", f"{now!r} with {has}", f"set {needs} instead of {has}"
    return f"{shown} is a key of {switch} {of}, not of {its}: remove it, or {remedy}"


def _required(part: type[Part]) -> list[str]:
    return [name for name, one in part.model_fields.items() if one.is_required()]

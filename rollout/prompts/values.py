"""Values of a prompt file as they are written: numbers keep their text; values without a text form are rejected."""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from miles_like.types import Json

_DIGITS = sys.int_info.default_max_str_digits  # the longest integer that Python converts to or from text


class WrittenFloat(float):
    """A float whose `str` is the text it was read from, such as "0.50" or "1e3"; arithmetic is that of float."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> WrittenFloat:
        made = super().__new__(cls, text)
        made.text = text
        return made

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[Callable[[str], WrittenFloat], tuple[str]]:
        return WrittenFloat, (self.text,)


def number(text: str) -> float:
    """A JSON number with a fraction or exponent. Raises ValueError if it is beyond the range of a 64-bit float."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is beyond the range of a 64-bit float: quote it as text")
    return value if repr(value) == text else WrittenFloat(text)


def integer(text: str) -> int | float:
    """A JSON integer. Raises ValueError for more digits than Python converts (4,300)."""
    if len(text) > _DIGITS:
        raise ValueError(f"an integer has {len(text)} digits, but at most {_DIGITS} are supported: quote it as text")
    return int(text) if text != "-0" else WrittenFloat(text)


def text_of(value: object) -> str:
    """Text, a number, a truth value or a date as text; None is "".

    Raises ValueError for anything else (a list, an object, bytes) and for NaN and infinities.
    """
    match value:
        case None:
            return ""
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case float() if not math.isfinite(value):
            raise ValueError(f"is {value}, expected text or a finite number")
        case Decimal():
            return format(value, "f")
        case int() | float() | datetime.date() | datetime.time() | datetime.timedelta():
            return str(value)
    kinds: dict[type, str] = {dict: "an object", list: "a list", tuple: "a list", bytes: "bytes"}
    kind = kinds.get(type(value), type(value).__name__)
    raise ValueError(f"is {kind} ({_shortened(value)}), expected text or a number")


def _shortened(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def as_json(value: Any) -> Json:
    """The value as JSON; dates and decimals become text by `text_of`.

    Raises ValueError for bytes, NaN, infinities and values of other types.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, dict):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(v) for v in value]
    return text_of(value)

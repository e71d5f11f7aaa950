"""Converts the result of a reward function to a Score or an Unscored, or raises ValueError."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from miles_like.limits.user_errors import shown
from miles_like.types import Score, Unscored

TOTALS = ("score", "reward")  # keys of a dict's total; the first one present is used
RETURNED_NONE = "the reward function returned None"
_WHY = "reason"
_REASON_CHARS = 120  # a reason is a key of counters and stands in a log line
MOST_PARTS = 64  # each part is a metric and a TensorBoard tag to the end of the run
_NAME = re.compile(r"[\w./-]{1,64}")


def outcome_of(returned: object) -> Score | Unscored:
    """A number or a bool is the score; None is Unscored. The total of a dict is its "score", else its "reward", else
    the sum of its numbers; its other numbers are parts, and text is ignored. A dict whose total is None is Unscored
    with its "reason"; so is a dict without a total that has a None value, since None is not 0. Score and Unscored are
    returned as they are.

    Raises ValueError for any other value, and for a number that is not finite.
    """
    if isinstance(returned, Unscored):
        return replace(returned, reason=_shortened(returned.reason))
    if isinstance(returned, Score):
        return returned
    if returned is None:
        return Unscored(reason=RETURNED_NONE)
    return _of_parts(returned) if isinstance(returned, Mapping) else Score(value=number(returned, "it"))


def _of_parts(named: Mapping[object, object]) -> Score | Unscored:
    values = {str(k): v for k, v in named.items()}
    total = next((k for k in TOTALS if k in values), None)
    if any(values[k] is None for k in ([total] if total is not None else values.keys() - {_WHY})):
        return Unscored(reason=_shortened(str(values.get(_WHY) or RETURNED_NONE)))
    parts = {k: number(v, f"its part {k!r}") for k, v in values.items() if k != total and not isinstance(v, str | None)}
    if len(parts) > MOST_PARTS:
        raise ValueError(f"it has {len(parts)} parts, but at most {MOST_PARTS} are supported: remove some")
    if (wrong := next((k for k in parts if not _NAME.fullmatch(k)), None)) is not None:
        raise ValueError(
            f"its part {wrong[:80]!r} is not a valid metric name: expected 1 to 64 letters, digits, _ . / or -"
        )
    if total is not None:
        return Score(value=number(values[total], f"its {total!r}"), parts=parts)
    if not parts:
        raise ValueError(f"it is {dict(values)!r:.200}: return the total as {TOTALS[0]!r}, or named numbers to sum")
    return Score(value=math.fsum(parts.values()), parts=parts)


def _shortened(reason: str) -> str:
    return " ".join(reason[: 4 * _REASON_CHARS].split())[:_REASON_CHARS]


def number(value: object, what: str) -> float:
    """A finite number of Python or numpy, or a tensor of one element, as a float. Raises ValueError naming `what`."""
    if isinstance(value, np.generic | np.ndarray | Tensor) and value.shape in ((), (1,)):
        value = value.item()
    if not isinstance(value, int | float):
        raise ValueError(f"{what} is {value!r:.200}, expected a number, a bool, a dict of named numbers, or None")
    try:
        finite = math.isfinite(value)
    except OverflowError:
        finite = False
    if not finite:
        raise ValueError(
            f"{what} is {shown(value)}, which is not finite: return None for a sample that cannot be scored"
        )
    return float(value)


def each(returned: object, n: int) -> list[object]:
    """The `n` results in a list, a tuple, an array or a tensor. Raises ValueError for any other value."""
    if isinstance(returned, Tensor | np.ndarray):
        returned = returned.reshape(-1).tolist()
    if not isinstance(returned, Sequence) or isinstance(returned, str):
        raise ValueError(f"it returned {shown(returned)} for {n} samples, expected a list with one result per sample")
    if len(returned) != n:
        raise ValueError(f"it returned {len(returned)} results for {n} samples, expected one per sample, in order")
    return list(returned)

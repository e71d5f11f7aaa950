"""Values of tokens on their way between the processes that hold and use them.

Tensors travel as numpy arrays, which Ray's object store gives to each reader on its node without a copy. A process that
only decides calls `refuse_parcels`, and opens none from then on.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
_refused_by: str | None = None


class ParcelRefusedError(RuntimeError):
    """A process that decides without values of tokens was sent some."""


class Parcel(Generic[T]):
    """A value of tensors, dataclasses and containers. Its tensors must not be written to after it was received: other
    processes may read the same memory."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (_as_arrays(self.value),)

    def copied(self) -> Parcel[T]:
        """The same value, with tensors in new memory."""
        return Parcel(_as_tensors(copy.deepcopy(_as_arrays(self.value))))


def refuse_parcels(process: str | None) -> None:
    """From now on a parcel that is received raises ParcelRefusedError with the name of this process; None: it does
    not."""
    global _refused_by
    _refused_by = process


def _opened(packed: Any) -> Parcel[Any]:
    if _refused_by is not None:
        raise ParcelRefusedError(
            f"values of tokens were sent to {_refused_by}, which reads lengths and rewards only: send a record, or "
            "the reference to the values"
        )
    return Parcel(_as_tensors(packed))


class _Array:
    """A tensor as an array."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __reduce__(self) -> tuple[Any, ...]:
        return _Array, (self.array,)


class _Made:
    """A dataclass as its type and fields."""

    __slots__ = ("kind", "values")

    def __init__(self, kind: type[Any], values: Mapping[str, Any]) -> None:
        self.kind, self.values = kind, values

    def __reduce__(self) -> tuple[Any, ...]:
        return _Made, (self.kind, self.values)


def _as_arrays(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Array(value.detach().cpu().contiguous().numpy())
    if is_dataclass(value) and not isinstance(value, type):
        return _Made(type(value), {f.name: _as_arrays(getattr(value, f.name)) for f in fields(value) if f.init})
    if isinstance(value, Mapping):
        return {k: _as_arrays(v) for k, v in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_as_arrays(v) for v in value)
    return value


def _as_tensors(value: Any) -> Any:
    if isinstance(value, _Array):
        return torch.from_numpy(value.array)
    if isinstance(value, _Made):
        return value.kind(**{k: _as_tensors(v) for k, v in value.values.items()})
    if type(value) is dict:
        return {k: _as_tensors(v) for k, v in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_as_tensors(v) for v in value)
    return value


def _do_not_warn_of_read_only_arrays() -> None:
    """torch warns of a tensor whose memory cannot be written to once a process: here, unseen."""
    array = np.zeros(1)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(array)


_do_not_warn_of_read_only_arrays()

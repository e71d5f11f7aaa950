"""Which cases of a module fixture the session's tests use: a tier runs no ranks for cases whose tests it leaves out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def chosen(request: pytest.FixtureRequest, argument: str, cases: Iterable[T]) -> list[T]:
    """Those of `cases`, in their order, that a selected test of the module has as its parameter `argument`."""
    asked: list[Any] = [
        callspec.params[argument]
        for item in request.session.items
        if item.path == request.path
        and (callspec := getattr(item, "callspec", None)) is not None
        and argument in callspec.params
    ]
    return [case for case in cases if case in asked]


def checked(names: Iterable[T], first: Iterable[T]) -> list[Any]:
    """Parameters of `names`; those that are not in `first` run in `make test`, and not in `make check`."""
    kept = list(first)
    return [pytest.param(n, marks=[] if n in kept else [pytest.mark.slow]) for n in names]


def later(names: Iterable[T], first: Iterable[T], beside: str) -> list[Any]:
    """Parameters of `names`; those that are not in `first` run in `make test-all` only (tests/support/tiers.py)."""
    kept = list(first)
    return [pytest.param(n, marks=[] if n in kept else [pytest.mark.long(beside=beside)]) for n in names]

"""Coroutines that run at the same time and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_first_error(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, in order. The first error is raised at once, and what still runs is cancelled."""
    tasks = [asyncio.ensure_future(c) for c in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for t in tasks:
            t.cancel()

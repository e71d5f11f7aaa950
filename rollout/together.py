"""Coroutines that run at the same time and end together, or one by one. None is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_first_error(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, in order. The first error ends them all: what still runs is cancelled, and it is raised when that
    has ended."""
    tasks = [asyncio.ensure_future(c) for c in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancelled(tasks)


async def as_they_end(calls: Iterable[Coroutine[Any, Any, T]]) -> AsyncGenerator[T, None]:
    """Their results, each as soon as it is there; those that end at the same moment in order. As `all_or_first_error`
    with an error, and also where nobody wants any more: close it (contextlib.aclosing) when not read to the end."""
    tasks = [asyncio.ensure_future(c) for c in calls]
    waiting = set(tasks)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [t for t in tasks if t in done]:
                yield task.result()
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """When all have ended; what they raised beside the first error, or raise now, is of no interest to anybody."""
    for t in tasks:
        t.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

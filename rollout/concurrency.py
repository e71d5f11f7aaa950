"""Run coroutines concurrently and leave no task behind, neither on an error nor on cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_first_error(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. On the first error the other coroutines are cancelled and awaited; then it is raised."""
    tasks = [asyncio.ensure_future(c) for c in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(tasks)


async def as_completed(calls: Iterable[Coroutine[Any, Any, T]]) -> AsyncGenerator[T, None]:
    """The results as they become available; those available at the same moment are in order.

    On an error, and when the generator is closed early, the remaining coroutines are cancelled and awaited. Wrap it in
    contextlib.aclosing unless it is read to the end.
    """
    tasks = [asyncio.ensure_future(c) for c in calls]
    waiting = set(tasks)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [t for t in tasks if t in done]:
                yield task.result()
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel and await all tasks. Errors other than the one already raised are ignored."""
    for t in tasks:
        t.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""Calls of users' functions, each with a time limit: one that never answers ends with a sentence, not never."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from miles_like.rewards.threads import DaemonThreads


class Limited:
    """seconds: of each call. Ordinary functions run in a thread, one at a time, so that one that blocks delays neither
    the event loop nor, once it is given up, the end of the process; coroutines run in the event loop."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._threads = DaemonThreads()
        self._turn = asyncio.Lock()

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What it returns, or what that gives when awaited. Raises TimeoutError with a sentence, and whatever the
        function raises."""
        if _is_async(function):
            return await self._within(function(*args, **kwargs))
        async with self._turn:
            found = await self._within(self._threads.run(partial(function, *args, **kwargs)))
        return await self._within(found) if inspect.isawaitable(found) else found

    async def _within(self, answer: Any) -> Any:
        try:
            async with asyncio.timeout(self._seconds) as limit:
                return await answer
        except TimeoutError:
            if not limit.expired():
                raise  # the function's own
            raise TimeoutError(
                f"no answer within {self._seconds:g} s: raise rollout.call_timeout_s, or have it end by itself"
            ) from None


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

"""Time limits for calls of user functions."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from miles_like.limits.threads import DaemonThreads
from miles_like.plugins import is_async


class TimeLimitedCalls:
    """Call functions and coroutine functions, each with a limit of `seconds`.

    Coroutines run in the event loop. Other functions run one at a time in a daemon thread, so a function that blocks
    delays neither the event loop nor, after its time limit, the end of the process.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._threads = DaemonThreads()
        self._turn = asyncio.Lock()

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The function's result, awaited if it is awaitable. Raises TimeoutError, and whatever the function raises."""
        if is_async(function):
            return await self._within(function(*args, **kwargs))
        async with self._turn:
            result = await self._within(self._threads.run(partial(function, *args, **kwargs)))
        return await self._within(result) if inspect.isawaitable(result) else result

    async def _within(self, call: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._seconds) as limit:
                return await call
        except TimeoutError:
            if not limit.expired():
                raise  # raised by the function
            raise TimeoutError(
                f"no answer within {self._seconds:g} s: raise rollout.call_timeout_s, or make the function "
                "return earlier"
            ) from None

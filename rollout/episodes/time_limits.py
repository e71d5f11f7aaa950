"""Time limits for calls of user functions."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from miles_like.limits.threads import DaemonThreads
from miles_like.plugins import is_async


class TimeLimitedCalls:
    """Call functions and coroutine functions, each with a limit of `seconds`.

    Coroutines run in the event loop. Other functions run in daemon threads, at most `threads` at a time, so a function
    that blocks delays neither the event loop nor, after its time limit, the end of the process.
    """

    def __init__(self, seconds: float, over: Callable[[], Exception] | None = None, threads: int = 1) -> None:
        """over: makes what is raised at the time limit; None: a TimeoutError that names rollout.call_timeout_s."""
        self._seconds, self._over = seconds, over
        self._threads = DaemonThreads()
        self._turn = asyncio.Semaphore(threads)

    async def call(
        self, function: Callable[..., Any], *args: Any, late: Callable[[Any], None] | None = None, **kwargs: Any
    ) -> Any:
        """The function's result, awaited if it is awaitable. late: gets, in a thread, the result of a function that
        returns after its caller was cancelled or its time was over. Raises TimeoutError, or what `over` makes, and
        whatever the function raises."""
        if is_async(function):
            return await self._within(function(*args, **kwargs))
        once = _Once(partial(function, *args, **kwargs), late)
        async with self._turn:
            try:
                result = await self._within(self._threads.run(once))
            except BaseException:
                once.give_up()
                raise
        return await self._within(result) if inspect.isawaitable(result) else result

    async def _within(self, call: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._seconds) as limit:
                return await call
        except TimeoutError:
            if not limit.expired():
                raise  # raised by the function
            if self._over is not None:
                raise self._over() from None
            raise TimeoutError(
                f"no answer within {self._seconds:g} s: raise rollout.call_timeout_s, or make the function "
                "return earlier"
            ) from None


class _Once:
    """A call whose result goes to its caller or, if that has given up, to `late`."""

    def __init__(self, call: Callable[[], Any], late: Callable[[Any], None] | None) -> None:
        self._call, self._late = call, late
        self._lock = threading.Lock()
        self._given_up = False
        self._results: list[Any] = []

    def __call__(self) -> Any:
        result = self._call()
        with self._lock:
            self._results.append(result)
            given_up = self._given_up
        if given_up and self._late is not None:
            self._late(result)
        return result

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            results = tuple(self._results)
        if self._late is not None:
            for result in results:
                threading.Thread(target=self._late, args=(result,), daemon=True).start()

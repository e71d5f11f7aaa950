"""Calls of a user's environment: made, asked and closed within time limits; what each failure costs.

An environment that does not answer in `environment_s`, or raises EnvironmentLost, costs one episode. Every other
exception ends the run.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from miles_like.limits.user_errors import raised, shown
from miles_like.protocols import Environment, MakeEnvironment
from miles_like.types import EnvironmentLost, Observation, Prompt, Sample
from rollout.episodes.time_limits import TimeLimitedCalls

_log = logging.getLogger(__name__)

TIMEOUT = "environment timeout"  # reason of a discarded episode
_REASON = 100  # most characters of one


class EnvironmentCalls:
    """call_s: limit in seconds for creating an environment and for each of its answers, which ends the run;
    environment_s: one that discards the episode, in place of it; threads: in which functions without async are called
    at once."""

    def __init__(
        self, make: MakeEnvironment, *, call_s: float, environment_s: float | None = None, threads: int = 1
    ) -> None:
        self._make = make
        self._calls = TimeLimitedCalls(call_s, threads=threads)
        if environment_s is not None:
            self._calls = TimeLimitedCalls(environment_s, partial(EnvironmentLost, TIMEOUT), threads)

    async def make(self, prompt: Prompt, *, seed: int) -> Environment:
        """Raises EnvironmentLost, and RuntimeError naming the prompt. An environment that a thread creates after its
        time limit is closed there."""
        try:
            made: Environment = await self._calls.call(self._make, prompt, seed=seed, late=_close_late)
            return made
        except EnvironmentLost:
            raise
        except Exception as e:  # user code may raise anything
            raise RuntimeError(f"cannot create the environment of prompt {prompt.id!r}: {raised(e)}") from e

    async def answer(self, environment: Environment, sample: Sample, turn: str) -> Observation:
        """Raises EnvironmentLost, and RuntimeError naming the sample."""
        try:
            answer = await self._calls.call(environment, sample, turn)
        except EnvironmentLost:
            raise
        except Exception as e:  # user code may raise anything
            raise RuntimeError(
                f"the environment of sample {sample.name} failed: {raised(e)}; the policy's turn was {turn[:200]!r}"
            ) from e
        if not isinstance(answer, Observation):
            raise RuntimeError(
                f"the environment of sample {sample.name} returned {shown(answer)}: expected an Observation"
            )
        return answer

    async def close(self, environment: Environment, name: str) -> None:
        """Calls the environment's `close`, if it has one, also where the caller is cancelled meanwhile. A failure is a
        warning. name: of the sample."""
        close = getattr(environment, "close", None)
        if close is None:
            return
        closing = asyncio.ensure_future(self._close(close, name))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait({closing})
            raise

    async def _close(self, close: Callable[[], Any], name: str) -> None:
        try:
            await self._calls.call(close)
        except Exception as e:  # user code may raise anything
            _log.warning("the environment of sample %s was not closed: %s", name, raised(e))


def reason_of(lost: EnvironmentLost) -> str:
    """Why the episode is discarded: one short line."""
    return " ".join(str(lost).split())[:_REASON] or "environment lost"


def _close_late(environment: Any) -> None:
    """In a thread, of an environment that no episode uses."""
    try:
        closed = getattr(environment, "close", lambda: None)()
        if inspect.isawaitable(closed):
            asyncio.run(_awaited(closed))
    except Exception as e:  # user code may raise anything
        _log.warning("an environment that was created after its time limit was not closed: %s", raised(e))


async def _awaited(closed: Any) -> None:
    await closed

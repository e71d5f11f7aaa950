"""A user's reward function, of any of the styles, sync or async, as something that can be asked."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from miles_like.rewards.outcome import each, outcome_of
from miles_like.rewards.scorer import Ask
from miles_like.rewards.styles import STYLES, Logged, recognised
from miles_like.rewards.threads import DaemonThreads, keep_to_the_end
from miles_like.types import Json, Prompt, Sample, Score, Unit

PATIENCE_S = 5.0  # of a call that is cancelled


def calling(
    function: Callable[..., Any],
    *,
    said: str,
    style: str | None = None,
    unit: Unit | None = None,
    args: Mapping[str, Json] | None = None,
    threads: DaemonThreads,
) -> tuple[Ask, Unit]:
    """How to ask it, and what it must see at once. Sync functions run in `threads`, async ones in the loop.

    Raises ValueError where its parameters do not say how it is called, or say something else than `style` and `unit`.
    """
    style, unit = _how(function, said, style, unit)
    how, names = STYLES[style], _accepted(function)

    async def ask(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> object:
        positional, keywords = how.given(prompts, samples, unit=unit, args=args or {})
        logged = Logged()
        if style == "trl":
            keywords |= {"log_metric": logged.metric, "log_extra": logged.extra}
        if names is not None:
            keywords = {k: v for k, v in keywords.items() if k in names}
        returned = await run(function, positional, keywords, threads)
        results = _with_logs(how.read(returned, len(samples), unit, args or {}), logged)
        return results[0] if unit is Unit.SAMPLE else results

    return ask, unit


async def run(
    function: Callable[..., Any], positional: Sequence[Any], keywords: Mapping[str, Any], threads: DaemonThreads
) -> object:
    """Its result, whether it is async, sync, or sync and gives something to await."""
    if is_async(function):
        return await or_left(function(*positional, **keywords))
    returned = await threads.run(lambda: function(*positional, **keywords))
    return await or_left(returned) if inspect.isawaitable(returned) else returned


async def or_left(awaited: Awaitable[object]) -> object:
    """Its result. Cancelled, it is given PATIENCE_S to end and is then left alone: a function with a bare `except` in
    a loop never ends, and whoever awaits it, as `asyncio.run` does of all that it can see, would not either."""

    async def ended() -> tuple[object, SystemExit | None]:
        try:
            return await awaited, None
        except SystemExit as e:  # a task would end the loop with it
            return None, e

    task = asyncio.ensure_future(ended())
    try:
        returned, left = await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=PATIENCE_S)
        raise
    finally:
        if not task.done():
            asyncio._unregister_task(task)  # documented, for who makes tasks that asyncio is to see or not to see
            keep_to_the_end(task)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # of no interest any more
    if left is not None:
        raise left
    return returned


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _how(function: Callable[..., Any], said: str, style: str | None, unit: Unit | None) -> tuple[str, Unit]:
    seen = recognised(function)
    if seen is None and style is None and unit is None:
        raise ValueError(
            f"{said}: its parameters do not say how it is called: name them (prompt, sample), (prompt, samples) or "
            f"(prompts, samples), or set reward.style to one of {', '.join(STYLES)}"
        )
    if style is None:
        style = "own" if seen is None else seen[0]
    units = STYLES[style].units
    by_name = seen[1] if seen is not None and seen[0] == style else None
    if unit is None:
        return style, by_name or units[0]
    if unit not in units:
        raise ValueError(
            f"{said}: reward.unit = {unit.value!r}, but style {style!r} is asked by {', '.join(u.value for u in units)}"
        )
    if by_name not in (None, unit) and style in ("own", "slime"):
        raise ValueError(
            f"{said}: reward.unit = {unit.value!r}, but its parameters are those of unit {by_name.value!r}: remove it"
        )
    return style, unit


def _accepted(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the keywords that it takes; None: any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


def _with_logs(results: list[object], logged: Logged) -> list[object]:
    """Figures that a function logged become parts: a metric of every sample of the call, a column's of theirs."""
    columns = {k: each(v, len(results)) for k, v in logged.columns.items()}
    if not (logged.metrics or columns):
        return results
    out: list[object] = []
    for i, result in enumerate(results):
        outcome = outcome_of(result)
        if isinstance(outcome, Score):
            numbers = {k: v[i] for k, v in columns.items() if isinstance(v[i], int | float)}
            parts = {**outcome.parts, **logged.metrics, **numbers}
            outcome = outcome_of({**parts, "score": outcome.value})
        out.append(outcome)
    return out

"""Adapts a user's reward function, of any style, sync or async, to one async call."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from miles_like.limits.threads import DaemonThreads, keep_until_exit
from miles_like.plugins import is_async
from miles_like.rewards.outcome import each, outcome_of
from miles_like.rewards.scorer import RewardCall
from miles_like.rewards.styles import STYLES, Logged, recognised
from miles_like.types import Json, Prompt, Sample, Score, Unit

PATIENCE_S = 5.0  # for a cancelled call to end


def adapt(
    function: Callable[..., Any],
    *,
    label: str,
    style: str | None = None,
    unit: Unit | None = None,
    args: Mapping[str, Json] | None = None,
    threads: DaemonThreads,
) -> tuple[RewardCall, Unit]:
    """The async call of the function, and the unit of samples for one call. Sync functions run in `threads`, async ones
    in the event loop.

    Raises ValueError where neither the parameter names nor `style` and `unit` determine the call, or where they
    contradict each other.
    """
    style, unit = _style_and_unit(function, label, style, unit)
    convention, names = STYLES[style], _accepted(function)

    async def call(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> object:
        positional, keywords = convention.arguments(prompts, samples, unit=unit, args=args or {})
        logged = Logged()
        if style == "trl":
            keywords |= {"log_metric": logged.metric, "log_extra": logged.extra}
        if names is not None:
            keywords = {k: v for k, v in keywords.items() if k in names}
        returned = await run(function, positional, keywords, threads)
        results = _with_logs(convention.results(returned, len(samples), unit, args or {}), logged)
        return results[0] if unit is Unit.SAMPLE else results

    return call, unit


async def run(
    function: Callable[..., Any], positional: Sequence[Any], keywords: Mapping[str, Any], threads: DaemonThreads
) -> object:
    """The result of a function that is async, sync, or sync and returns an awaitable."""
    if is_async(function):
        return await await_or_abandon(function(*positional, **keywords))
    returned = await threads.run(lambda: function(*positional, **keywords))
    return await await_or_abandon(returned) if inspect.isawaitable(returned) else returned


async def await_or_abandon(awaited: Awaitable[object]) -> object:
    """The result of `awaited`. When cancelled, waits PATIENCE_S for `awaited` to end and then abandons it: a function
    with a bare `except` in a loop never ends, and would block every caller that awaits it, such as `asyncio.run`, which
    awaits all tasks."""

    async def ended() -> tuple[object, SystemExit | None]:
        try:
            return await awaited, None
        except SystemExit as e:  # raised in a task, it would end the event loop
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
            asyncio._unregister_task(task)  # a documented function, for third-party event loops
            keep_until_exit(task)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks the exception as retrieved
    if left is not None:
        raise left
    return returned


def _style_and_unit(function: Callable[..., Any], label: str, style: str | None, unit: Unit | None) -> tuple[str, Unit]:
    inferred = recognised(function)
    if inferred is None and style is None and unit is None:
        raise ValueError(
            f"{label}: its parameter names do not match a style: rename them to (sample), (prompt, sample), "
            f"(prompt, samples) or (prompts, samples), or set reward.style to one of {', '.join(STYLES)}"
        )
    if style is None:
        style = "own" if inferred is None else inferred[0]
    units = STYLES[style].units
    inferred_unit = inferred[1] if inferred is not None and inferred[0] == style else None
    if unit is None:
        return style, inferred_unit or units[0]
    if unit not in units:
        raise ValueError(
            f"{label}: reward.unit = {unit.value!r}, but style {style!r} is called per "
            f"{', '.join(u.value for u in units)}"
        )
    if inferred_unit is not None and inferred_unit is not unit and style in ("own", "slime"):
        raise ValueError(
            f"{label}: reward.unit = {unit.value!r}, but its parameters match unit {inferred_unit.value!r}: remove it"
        )
    return style, unit


def _accepted(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the keywords that the function accepts; None: any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


def _with_logs(results: list[object], logged: Logged) -> list[object]:
    """Adds what the function logged to the results as parts: a metric to every sample of the call, a column's values
    to their samples."""
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

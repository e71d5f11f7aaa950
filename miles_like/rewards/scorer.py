"""Calls a reward function with a time limit, retries and bounded concurrency.

A failure has one of two outcomes. A sample that could not be scored is Unscored, with a reason, after the last attempt.
A faulty function (it raises, or returns an invalid result) ends the run with an error, because training on a wrong
score would go unnoticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sysconfig
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from miles_like.limits.user_errors import raised, shown
from miles_like.protocols import RewardLog
from miles_like.rewards.outcome import MOST_PARTS, each, outcome_of
from miles_like.types import Prompt, Sample, Score, Unit, Unscored

T = TypeVar("T")
RewardCall = Callable[
    [Sequence[Prompt], Sequence[Sample]], Awaitable[object]
]  # unit SAMPLE: of one sample, to its result
Outcome = Score | Unscored
MOST_REASONS = 64  # distinct reasons: each stays in the ledger and the metrics to the end of the run
OTHER_REASONS = "other reasons"
_LATE = "no reward within"  # begins the reason of a sample whose call has exceeded the time limit
_SHORTEST_S, _LONGEST_S = 0.05, 30.0  # between two attempts while a server is waited for
_log = logging.getLogger(__name__)
_NOT_THE_USERS = (str(Path(__file__).parents[1]), *(sysconfig.get_path(k) for k in ("stdlib", "purelib", "platlib")))


async def _no_op() -> None:
    """Default `end`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the calls of a reward function."""

    timeout_s: float | None = None  # of one attempt
    retries: int = 0  # further attempts for a sample without a score
    retry_wait_s: float = 0.0  # before the first retry, doubled before each further one
    outage_s: float = 0.0  # for which a server may be away before its samples go without a score
    concurrency: int | None = None  # concurrent calls; None: any number


@dataclass(kw_only=True)
class Scorer:
    """A RewardFn of one function."""

    call: RewardCall
    unit: Unit = Unit.SAMPLE
    slow: bool = False
    compares: str | None = None
    limits: Limits = Limits()
    end: Callable[[], Awaitable[None]] = _no_op
    log: RewardLog | None = None  # None: calls are not counted
    spent: Callable[[], int] = lambda: 0  # tokens of a judge since the last call
    _room: contextlib.AbstractAsyncContextManager[object] = field(init=False)
    _parts: set[str] = field(init=False, default_factory=set)  # names of all results so far
    _reasons: set[str] = field(init=False, default_factory=set)
    _away_since: float | None = field(init=False, default=None)  # by time.monotonic: its server has not answered since

    def __post_init__(self) -> None:
        most = self.limits.concurrency
        self._room = contextlib.nullcontext() if most is None else asyncio.Semaphore(most)

    async def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Sequence[Outcome]:
        calls = split_by_unit(self.unit, prompts, samples)
        if len(calls) == 1:
            return await self._scored(*calls[0])
        return [o for outcomes in await together(self._scored(*call) for call in calls) for o in outcomes]

    async def close(self) -> None:
        await self.end()

    async def _scored(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Outcome]:
        if self.log is None:
            return await self._retried(prompts, samples)
        self.log.begin(len(samples))
        began = time.monotonic()
        try:
            found = await self._retried(prompts, samples)
        finally:
            self.log.end(len(samples), time.monotonic() - began)
            self.log.spend(self.spent())
        for cause, n in _causes(found).items():
            self.log.fail(cause, n)
        return found

    async def _retried(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Outcome]:
        """Retries while a sample of the call is unscored, and as long as a server is waited for. A sample keeps its
        first score."""
        found, tried, waited = await self._attempt(prompts, samples), 0, 0
        while True:
            outage = self._is_waited_for(found)
            if not any(isinstance(o, Unscored) for o in found) or not (outage or tried < self.limits.retries):
                return found
            if outage:
                await asyncio.sleep(min(max(self.limits.retry_wait_s * 2.0**waited, _SHORTEST_S), _LONGEST_S))
                waited += 1
            else:
                await asyncio.sleep(self.limits.retry_wait_s * 2.0**tried)
                tried += 1
            if self.log is not None:
                for cause, n in _causes(found).items():
                    self.log.retry(cause, n)
            again = await self._attempt(prompts, samples)
            found = [new if isinstance(old, Unscored) else old for old, new in zip(found, again, strict=True)]

    def _is_waited_for(self, found: Sequence[Outcome]) -> bool:
        """Whether a server of these outcomes is away, and for less than `limits.outage_s` so far, over all calls."""
        away = next((o for o in found if isinstance(o, Unscored) and o.away), None)
        if not self.limits.outage_s:
            return False
        now = time.monotonic()
        if away is None:
            if self._away_since is not None:
                _log.warning("the reward's server answers again after %.0f s", now - self._away_since)
            self._away_since = None
            return False
        if self._away_since is None:
            self._away_since = now
            _log.warning("%s: waiting for it for up to reward.outage_s = %g s", away.reason, self.limits.outage_s)
        return now - self._away_since < self.limits.outage_s

    async def _attempt(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Outcome]:
        async with self._room:
            try:
                async with asyncio.timeout(self.limits.timeout_s) as limit:
                    returned = await self.call(prompts, samples)
            except (Exception, SystemExit) as e:  # the user's code may raise anything
                if not limit.expired():
                    raise RuntimeError(
                        f"reward of {_named(prompts, samples)} failed: {raised(e)}{raised_at(e)}; "
                        f"{_given(prompts, samples)}"
                    ) from e
        # a function with a bare `except` swallows the CancelledError of the time limit, or of the end of the run
        if limit.expired():
            return [Unscored(reason=f"{_LATE} {self.limits.timeout_s:g} s") for _ in samples]
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError
        try:
            results = [returned] if self.unit is Unit.SAMPLE else each(returned, len(samples))
            return [self._bounded(outcome_of(r)) for r in results]
        except ValueError as e:
            raise RuntimeError(f"reward of {_named(prompts, samples)}: {e}; {_given(prompts, samples)}") from e

    def _bounded(self, outcome: Outcome) -> Outcome:
        """`outcome`, with its reason replaced by OTHER_REASONS where the run has MOST_REASONS others. Raises ValueError
        for more than MOST_PARTS names of parts in the run."""
        if isinstance(outcome, Unscored):
            if outcome.reason not in self._reasons and len(self._reasons) >= MOST_REASONS:
                return replace(outcome, reason=OTHER_REASONS)
            self._reasons.add(outcome.reason)
            return outcome
        new = outcome.parts.keys() - self._parts
        if len(self._parts) + len(new) > MOST_PARTS:
            raise ValueError(
                f"it has the part {min(new)!r}, but this run already has {len(self._parts)} other part names, and "
                f"at most {MOST_PARTS} are supported: return the same parts each time"
            )
        self._parts |= new
        return outcome


def _causes(found: Sequence[Outcome]) -> Counter[str]:
    """Cause (`RewardLog`) -> samples without a score."""
    unscored = [o for o in found if isinstance(o, Unscored)]
    return Counter("away" if o.away else "timeout" if o.reason.startswith(_LATE) else "unscored" for o in unscored)


async def together(calls: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """The results of concurrent calls, in order. Raises the first error and cancels the other calls."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(c) for c in calls]
    except ExceptionGroup as e:
        raise e.exceptions[0] from None
    return [t.result() for t in tasks]


def split_by_unit(
    unit: Unit, prompts: Sequence[Prompt], samples: Sequence[Sample]
) -> list[tuple[Sequence[Prompt], Sequence[Sample]]]:
    """The prompts and samples of each call of a function with this unit."""
    if unit is Unit.BATCH:
        return [(prompts, samples)]
    if unit is Unit.SAMPLE:
        return [([p], [s]) for p, s in zip(prompts, samples, strict=True)]
    pairs = itertools.groupby(zip(prompts, samples, strict=True), key=lambda pair: pair[0].id)
    groups = [list(group) for _, group in pairs]
    return [([p for p, _ in group], [s for _, s in group]) for group in groups]


def raised_at(error: BaseException) -> str:
    """Text like "at FILE:LINE in FUNCTION: SOURCE" about the innermost frame in the user's code: outside this package,
    the standard library and installed packages. Empty without such a frame."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [f for f in frames if not f.filename.startswith(_NOT_THE_USERS)]
    if not users:
        return ""
    frame = users[-1]
    return f" at {Path(frame.filename).name}:{frame.lineno} in {frame.name}: {(frame.line or '')[:120]}"


def _named(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> str:
    if len({p.id for p in prompts}) > 1:
        return f"{len(samples)} samples of prompts {prompts[0].id!r} .. {prompts[-1].id!r}"
    which = ", ".join(str(s.index) for s in samples)
    return f"prompt {prompts[0].id!r}, sample{'s' if len(samples) > 1 else ''} {which}"


def _given(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> str:
    first = "" if len(samples) == 1 else "first "
    return f"the {first}answer was {shown(prompts[0].answer)}, the {first}response {samples[0].text[:200]!r}"

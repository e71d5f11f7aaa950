"""A reward function with a time limit, further attempts and a limit of calls at the same time.

What can go wrong ends in one of two ways. A sample that nobody could score is Unscored, with a reason, after the last
attempt. A function that is wrong ends the run in one sentence: a wrong score would train without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from miles_like.rewards.outcome import MOST_PARTS, each, outcome_of
from miles_like.types import Prompt, Sample, Score, Unit, Unscored
from miles_like.user_errors import raised, shown

T = TypeVar("T")
Ask = Callable[[Sequence[Prompt], Sequence[Sample]], Awaitable[object]]  # with `unit` SAMPLE: one, and its result
Outcome = Score | Unscored
MOST_REASONS = 64  # that are counted one by one: each stays in the ledger and the metrics to the end of the run
OTHER_REASONS = "other reasons"
_NOT_THE_USERS = (str(Path(__file__).parents[1]), *(sysconfig.get_path(k) for k in ("stdlib", "purelib", "platlib")))


async def _nothing() -> None:
    """There is nothing to end."""


@dataclass(kw_only=True)
class Scorer:
    """A RewardFn of one function."""

    ask: Ask
    unit: Unit = Unit.SAMPLE
    slow: bool = False
    compares: str | None = None
    timeout_s: float | None = None  # of one attempt
    retries: int = 0  # further attempts for a sample without a score
    retry_wait_s: float = 0.0  # before the first of them, then twice as long each time
    concurrency: int | None = None  # calls at the same time; None: any number
    end: Callable[[], Awaitable[None]] = _nothing
    _room: contextlib.AbstractAsyncContextManager[object] = field(init=False)
    _parts: set[str] = field(init=False, default_factory=set)  # names of all results so far
    _reasons: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        limited = self.concurrency is not None
        self._room = asyncio.Semaphore(self.concurrency or 1) if limited else contextlib.nullcontext()

    async def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Sequence[Outcome]:
        parts = pieces(self.unit, prompts, samples)
        if len(parts) == 1:
            return await self._scored(*parts[0])
        return [o for some in await together(self._scored(*part) for part in parts) for o in some]

    async def close(self) -> None:
        await self.end()

    async def _scored(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Outcome]:
        """A sample keeps the first score that it gets, also where another of the same call has to be asked again."""
        found = await self._attempt(prompts, samples)
        for k in range(self.retries):
            if not any(isinstance(o, Unscored) for o in found):
                break
            await asyncio.sleep(self.retry_wait_s * 2**k)
            again = await self._attempt(prompts, samples)
            found = [new if isinstance(old, Unscored) else old for old, new in zip(found, again, strict=True)]
        return found

    async def _attempt(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Outcome]:
        async with self._room:
            try:
                async with asyncio.timeout(self.timeout_s) as limit:
                    returned = await self.ask(prompts, samples)
            except (Exception, SystemExit) as e:  # the user's code: whatever it raises, say what it was given
                if not limit.expired():
                    raise RuntimeError(
                        f"reward of {_named(prompts, samples)} failed: {raised(e)}{raised_at(e)}; "
                        f"{_given(prompts, samples)}"
                    ) from e
        # a function with a bare `except` takes the limit, or the end of the run, for an error of its own
        if limit.expired():
            return [Unscored(reason=f"no reward within {self.timeout_s:g} s") for _ in samples]
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError
        try:
            results = [returned] if self.unit is Unit.SAMPLE else each(returned, len(samples))
            return [self._known(outcome_of(r)) for r in results]
        except ValueError as e:
            raise RuntimeError(f"reward of {_named(prompts, samples)}: {e}; {_given(prompts, samples)}") from e

    def _known(self, outcome: Outcome) -> Outcome:
        """Itself. Raises ValueError where the run has seen MOST_PARTS other names of parts; counts a reason beyond
        MOST_REASONS as OTHER_REASONS."""
        if isinstance(outcome, Unscored):
            if outcome.reason not in self._reasons and len(self._reasons) >= MOST_REASONS:
                return Unscored(reason=OTHER_REASONS)
            self._reasons.add(outcome.reason)
            return outcome
        new = outcome.parts.keys() - self._parts
        if len(self._parts) + len(new) > MOST_PARTS:
            raise ValueError(
                f"it has the part {min(new)!r}, and {len(self._parts)} other names of parts were given in this run, at "
                f"most {MOST_PARTS}: name the same parts each time"
            )
        self._parts |= new
        return outcome


async def together(calls: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Their results, in order. The first error is raised, and what still runs is cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(c) for c in calls]
    except ExceptionGroup as e:
        raise e.exceptions[0] from None
    return [t.result() for t in tasks]


def pieces(
    unit: Unit, prompts: Sequence[Prompt], samples: Sequence[Sample]
) -> list[tuple[Sequence[Prompt], Sequence[Sample]]]:
    """Prompts and samples, cut into what has to be seen at once."""
    if unit is Unit.BATCH:
        return [(prompts, samples)]
    if unit is Unit.SAMPLE:
        return [([p], [s]) for p, s in zip(prompts, samples, strict=True)]
    pairs = itertools.groupby(zip(prompts, samples, strict=True), key=lambda pair: pair[0].id)
    cut = [list(of_prompt) for _, of_prompt in pairs]
    return [([p for p, _ in piece], [s for _, s in piece]) for piece in cut]


def raised_at(error: BaseException) -> str:
    """at FILE:LINE in FUNCTION: SOURCE, of the innermost frame outside this package, the standard library and
    installed packages, else of none: where a user's function went wrong."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_NOT_THE_USERS)]
    if not own:
        return ""
    frame = own[-1]
    return f" at {Path(frame.filename).name}:{frame.lineno} in {frame.name}: {(frame.line or '')[:120]}"


def _named(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> str:
    if len({p.id for p in prompts}) > 1:
        return f"{len(samples)} samples of prompts {prompts[0].id!r} .. {prompts[-1].id!r}"
    which = ", ".join(str(s.index) for s in samples)
    return f"prompt {prompts[0].id!r}, sample{'s' if len(samples) > 1 else ''} {which}"


def _given(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> str:
    first = "" if len(samples) == 1 else "first "
    return f"the {first}answer was {shown(prompts[0].answer)}, the {first}response {samples[0].text[:200]!r}"

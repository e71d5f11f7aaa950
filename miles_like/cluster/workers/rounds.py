"""A reward that scores all samples of a round in one call, where several workers have them: one of them calls it, with
what the others lend it. The process that decides passes the scores on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from miles_like.cluster.workers.link import Link, SentLostError, WorkerEnded
from miles_like.types import Prompt
from rollout.concurrency import all_or_first_error


class Sampled(Protocol):
    """A worker that samples a share of a round."""

    @property
    def link(self) -> Link: ...


class _Asks(NamedTuple):
    """A share whose samples wait for their scores."""

    worker: Sampled
    call: int


class _Lent(NamedTuple):
    """What its worker lends."""

    by: _Asks
    prompts: Sequence[str]  # id of that of each sample
    samples: Any  # a reference


class ScoredRound:
    """One round of `prompts`, of which `shares` workers have a share. A share asks once, or ends without."""

    def __init__(self, prompts: Sequence[Prompt], shares: int) -> None:
        self._places: Mapping[str, int] = {p.id: i for i, p in enumerate(prompts)}
        self._left = shares
        self._asking: list[_Asks] = []
        self._scored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def asks(self, worker: Sampled, call: int) -> None:
        """Returns when the worker has the scores of a share, or has ended. Raises what the reward raises."""
        self._asking.append(_Asks(worker, call))
        self.ends()
        await asyncio.shield(self._scored)

    def ends(self) -> None:
        """Call when a share ends that has not asked."""
        self._left -= 1
        if not self._left and self._asking:
            self._task = asyncio.create_task(self._score())
            self._task.add_done_callback(self._settle)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _settle(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._scored.cancel()
        elif (error := task.exception()) is not None:
            self._scored.set_exception(error)
            self._scored.exception()  # raised by `asks`, where one waits
        else:
            self._scored.set_result(None)

    async def _score(self) -> None:
        while lent := [one for one in await all_or_first_error(map(_lent, self._asking)) if one is not None]:
            order = sorted(
                ((self._places[prompt], i, n) for i, one in enumerate(lent) for n, prompt in enumerate(one.prompts)),
            )
            at = [(i, n) for _, i, n in order]
            try:
                sent = [one.samples for one in lent]
                (scores, _), _ = await lent[0].by.worker.link.exchange("score", at, sent=sent)
            except (WorkerEnded, SentLostError):  # without what it lent
                continue
            own: list[dict[int, Any]] = [{} for _ in lent]
            for (i, n), score in zip(at, scores, strict=True):
                own[i][n] = score
            await all_or_first_error(
                _give(one.by, [of[n] for n in range(len(of))]) for one, of in zip(lent, own, strict=True)
            )
            return


async def _lent(by: _Asks) -> _Lent | None:
    """None: its worker has ended."""
    try:
        (prompts, _), (samples,) = await by.worker.link.exchange("unscored", by.call, count=1)
    except WorkerEnded:
        return None
    return _Lent(by, prompts, samples)


async def _give(to: _Asks, scores: Sequence[Any]) -> None:
    try:
        await to.worker.link.call("scored", to.call, scores)
    except WorkerEnded:
        """Its samples are lost, which its share says."""

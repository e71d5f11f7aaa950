"""Checks of a training run's servers between two steps: their log-probabilities of one fixed text after every
publication, checksums of their weights, and their log-probabilities and routes against the trainer's on newly sampled
text.

Call `RunChecks.before_publication`, then publish, then call `RunChecks.published`, before the next training. Call
`RunChecks.before_training` between a step's rollout and its training: if a server's weights changed after the
publication, its samples are rejected before any weight is trained on them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rich.console import Console

from miles_like.alignment.gate import check_before_start
from miles_like.alignment.known_answer import KnownAnswer
from miles_like.alignment.live import Comparison
from miles_like.alignment.report import Report
from miles_like.types import Prompt, PublishReport, ServerFault, ServerLost
from rollout.episodes.pool import Lost
from rollout.seeds import seed_of
from rollout.sglang.client import ServerClient

_Held = Sequence[Mapping[str, str]]  # of each rank of a server: tensor name -> hash


class Replacements(Protocol):
    """Replaces servers of the run, and publishes to some of them (miles_like.run.setup.replacing)."""

    @property
    def left(self) -> int:
        """Servers that may still be replaced."""

    @property
    def limit(self) -> int:
        """Servers that may be replaced in all."""

    def expect(self) -> None:
        """A publication begins. Requests to a server that does not answer are sent to others, or wait."""

    def leave_out(self, urls: Collection[str]) -> None:
        """Sends no further request to these servers until `serve`."""

    async def publish(self, version: int, urls: Collection[str]) -> PublishReport:
        """Publishes to some of the servers."""

    async def replace(self, faults: Sequence[ServerFault]) -> None:
        """Stops servers and starts others at their addresses. Raises RuntimeError where one does not start."""

    async def join(self, version: int, urls: Collection[str]) -> PublishReport:
        """Publishes to servers that were started since, by one full load."""

    def serve(self) -> None:
        """All servers serve the version."""


@dataclass(slots=True, kw_only=True)
class RunChecks:
    """The checks of one run. Each comparison samples `check_prompts` of `prompts`; the step and the attempt determine
    which.

    known: the text that servers score after each publication; None: they are not asked. republish: publishes the
    trainer's weights again as the version that is given. turns: servers and trainer take turns, so that the servers get
    the weights once more after the trainer was asked. replacements: of servers that a publication left out or that do
    not compute with its weights; None: the run ends.
    comparison: the settings of a comparison; its prompts and its seed are replaced. idle: whether the servers have no
    request in flight after a publication; their caches are then emptied again.
    """

    clients: Sequence[ServerClient]
    known: KnownAnswer | None
    republish: Callable[[int], Awaitable[PublishReport]]
    comparison: Comparison
    prompts: Sequence[Prompt]
    check_prompts: int
    check_every: int  # steps; 0: only `at_start`
    checksums_every: int  # steps; 0: never
    seed: int
    idle: bool
    console: Console
    turns: bool = False
    replacements: Replacements | None = None
    _published: _Held = field(default=())
    _beside_training: bool = field(default=False, init=False)
    _times: int = field(default=0, init=False)  # that the version was published
    # since the last metrics: publications beside the first ones, and servers
    _republished: int = field(default=0, init=False)
    _replaced: int = field(default=0, init=False)

    async def before_publication(self) -> None:
        """Call with the weights that the publication will send."""
        if self.replacements is not None:
            self.replacements.expect()
        if self.known is not None:
            await self.known.expect()

    async def at_start(self, step: int, report: PublishReport | None) -> None:
        """Call before the first step of a process, and `before_publication` before it, also where nothing is published.
        Raises ValueError, naming the causes, where the sides differ by more than the precision explains, and
        RuntimeError as `published`."""
        self._times, self._beside_training = 0 if report is None else 1, False
        if report is not None:
            report, _ = await self._settle(step, report)
        if self.check_prompts:
            began = time.perf_counter()
            found = await self._of(step).short(self.clients, flush=True, lost=self._lost)
            check_before_start(found, self.console, time.perf_counter() - began)
        if report is None or self.check_prompts:  # with turns the comparison has published once more
            report, _ = await self._settle(step, report)
        await self._note(step, report)

    def hold_training(self, step: int) -> bool:
        """Whether `published` compares samples of `step` with the trainer, or records checksums that are checked before
        the next training."""
        return bool(self.check_prompts and self.check_every and not step % self.check_every) or self._due(step)

    async def published(
        self, step: int, report: PublishReport, *, beside_training: bool = False
    ) -> tuple[PublishReport, Mapping[str, float]]:
        """Call after the publication of `step` trained steps. Returns its report, with all that was sent, and metrics.
        beside_training: the trainer trains the next step and is not asked; not where `hold_training`.

        Servers that do not compute with the published weights are published to once more, then replaced. Raises
        RuntimeError naming them when they still do not and no further one may be replaced, and naming step and causes
        when two comparisons of different samples both exceed what the precision explains; a rare near-tie exceeds it in
        one comparison only."""
        self._times, self._beside_training = 1, beside_training
        whole, figures = await self._settle(step, report)
        if self.check_prompts and self.check_every and not step % self.check_every:
            await self._compare(step)
            whole, figures = await self._settle(step, whole)  # with turns the comparison has published once more
        assert whole is not None, "of a publication"
        await self._note(step, whole)
        figures["sync/republications"], figures["sync/replacements"] = float(self._republished), float(self._replaced)
        self._republished = self._replaced = 0
        return whole, figures

    async def _compare(self, step: int) -> None:
        found: list[Report] = []
        for attempt in range(2):
            found.append(await self._of(step, attempt).short(self.clients, flush=self.idle, lost=self._lost))
            if found[-1].ok:
                return
        raise RuntimeError(
            f"after step {step} trainer and rollout differ: {found[-1].sentence()}. Two comparisons of "
            f"{self.check_prompts} prompts failed; nothing of this step is saved: `miles-like verify` diagnoses "
            "the difference, and --resume continues from the latest checkpoint"
        )

    @property
    def _lost(self) -> Lost | None:
        """Of a comparison, which samples on the servers that answer; the others are replaced after it, or at the next
        publication."""
        return self._report if self.replacements is not None and self.replacements.left else None

    def _report(self, why: str) -> None:
        self.console.print(f"{'':12}{why}; its requests go to other servers", markup=False, soft_wrap=True)

    async def before_training(self, step: int) -> None:
        """Raises RuntimeError naming server and tensors when a server's weights are not those published last. Checks
        only every `checksums_every` steps."""
        if not (self._due(step) and self._published):
            return
        for client, held in zip(self.clients, await self._held(), strict=True):
            if held is not None and (wrong := differing(self._published, held)):
                shown = f"{', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}"
                raise RuntimeError(
                    f"step {step + 1}: server {client.url} has different weights from those published to it as "
                    f"version {step}: {len(wrong)} tensors differ ({shown}). Its samples are not trained: check "
                    "the machine's memory, and that no other process publishes to the server; --resume continues "
                    "from the latest checkpoint"
                )

    async def _settle(self, step: int, report: PublishReport | None) -> tuple[PublishReport | None, dict[str, float]]:
        """Let every server score the known text, and repair those that do not serve version `step`. report: of its
        publication so far; it is returned with what was sent since. Also returns metrics."""
        faults = [] if report is None else list(report.failed)
        wrong, gap = await self._wrong({c.url for c in self.clients} - {f.url for f in faults})
        faults += wrong
        if faults and self.replacements is not None:  # what a server computes with other weights would be trained
            self.replacements.leave_out({f.url for f in faults})
        if any(f.answers for f in faults):
            report, faults, gap = await self._again(step, report, faults)
        while faults:
            report, faults, more = await self._replace(step, report, faults)
            gap = max(gap, more)
        if self.replacements is not None:
            self.replacements.serve()
        return report, {} if self.known is None else {"mismatch/known_answer": gap}

    async def _again(
        self, step: int, report: PublishReport | None, faults: Sequence[ServerFault]
    ) -> tuple[PublishReport, list[ServerFault], float]:
        """Publishes once more, to all servers that answer. Returns as `_replace`."""
        again = " again" if self._times else ""
        text = f"version {step} is published{again}: {'; '.join(f.why for f in faults if f.answers)}"
        self.console.print(f"{'':12}{text}", markup=False, soft_wrap=True)
        dead = [f for f in faults if not f.answers]
        there = {c.url for c in self.clients} - {f.url for f in dead}
        if dead and self.replacements is not None:
            later = await self.replacements.publish(step, there)
        else:
            later = await self.republish(step)
        self._times, self._republished = self._times + 1, self._republished + 1
        wrong, gap = await self._wrong(there - {f.url for f in later.failed})
        return later if report is None else report.followed_by(later), [*dead, *later.failed, *wrong], gap

    async def _replace(
        self, step: int, report: PublishReport | None, faults: Sequence[ServerFault]
    ) -> tuple[PublishReport, list[ServerFault], float]:
        """Replaces servers, which join at version `step`. Returns the report of all that was sent of it, the faults of
        those that were started, and the greatest gap of the others."""
        replacements, urls = self.replacements, {f.url for f in faults}
        if replacements is None or replacements.left < len(faults):
            raise RuntimeError(self._refusal(step, faults))
        await replacements.replace(faults)
        self._replaced += len(faults)
        joined = await replacements.join(step, urls)
        wrong, gap = await self._wrong(urls - {f.url for f in joined.failed})
        if report is not None and report.checksums and joined.checksums and report.checksums != joined.checksums:
            which = ", ".join(differing(report.checksums, joined.checksums)[:3])
            wrong += [
                ServerFault(url, f"server {url} has different weights from the others ({which})", True)
                for url in sorted(urls - {f.url for f in [*joined.failed, *wrong]})
            ]
        whole = joined if report is None else report.followed_by(joined)
        return whole, [*joined.failed, *wrong], gap

    def _refusal(self, step: int, faults: Sequence[ServerFault]) -> str:
        times = {1: "once", 2: "twice"}.get(self._times, f"{self._times} times")
        scored = "" if self.known is None else f" (median of {len(self.known.text) - 1} tokens that all servers score)"
        bound = " Servers are not replaced while servers and trainer take turns." if self.turns else ""
        if self.replacements is not None:
            done = self.replacements.limit - self.replacements.left
            bound = f" Servers replaced in this run: {done}; publish.replacements = {self.replacements.limit}."
        return (
            f"version {step} was published {times}, but servers do not compute with it: "
            f"{'; '.join(f.why for f in faults)}{scored}.{bound} No sample of it is trained: `miles-like "
            "verify` finds tensors and layers that differ, and --resume continues from the latest checkpoint"
        )

    async def _wrong(self, urls: Collection[str]) -> tuple[list[ServerFault], float]:
        """Which of the servers at `urls` do not compute with the weights that they are left with, and the greatest gap
        of the others in nats."""
        asked = [client for client in self.clients if client.url in urls]
        if self.known is None or not asked:
            return [], 0.0
        beside = self._beside_training
        wrong, gap = await self.known.compare(asked, rescore=not beside, near_ties=beside)
        if self.turns and self.known.rescored:  # the trainer had its turn, so the servers get the weights again
            wrong, gap = await self.known.compare(asked, rescore=False)
        return [ServerFault(w.url, w.sentence(), answers=True) for w in wrong], gap

    def _due(self, step: int) -> bool:
        return bool(self.checksums_every) and (step + 1) % self.checksums_every == 0

    async def _note(self, step: int, report: PublishReport | None) -> None:
        """Record the checksums that the servers must still have before the next step trains."""
        self._published = ()
        if self._due(step):
            own = [] if report and report.checksums else [held for held in await self._held() if held is not None]
            self._published = report.checksums if report and report.checksums else next(iter(own), ())

    async def _held(self) -> list[_Held | None]:
        """Of each server; None for one that does not answer and is replaced at the next publication."""

        async def held(client: ServerClient) -> _Held | None:
            try:
                return (await client.checksum()).per_rank
            except ServerLost:
                if self.replacements is None or not self.replacements.left:
                    raise
                return None

        return list(await asyncio.gather(*(held(client) for client in self.clients)))

    def _of(self, step: int, attempt: int = 0) -> Comparison:
        n, size = self.check_prompts, len(self.prompts)
        chosen = [self.prompts[((step + attempt) * n + i) % size] for i in range(min(n, size))]
        seed = seed_of(self.seed, f"verify {step}.{attempt}" if step or attempt else "verify")
        return replace(self.comparison, prompts=chosen, params=replace(self.comparison.params, sampling_seed=seed))


def differing(published: _Held, held: _Held) -> list[str]:
    """Sorted names of tensors whose hash differs on any rank or that only one side has; one entry with both numbers if
    the numbers of ranks differ."""
    if len(published) != len(held):
        return [f"{len(held)} ranks in place of {len(published)}"]
    return sorted(
        {n for a, b in zip(published, held, strict=True) for n in a.keys() | b.keys() if a.get(n) != b.get(n)}
    )

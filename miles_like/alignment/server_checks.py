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
from rollout.episodes.serving import Serving
from rollout.seeds import seed_of
from rollout.sglang.client import ServerClient

_Held = Sequence[Mapping[str, str]]  # of each rank of a server: tensor name -> hash


class Fleet(Protocol):
    """The servers of a run that goes on without some of them (miles_like.fleet)."""

    @property
    def needs_trainer(self) -> bool:
        """Whether a server that joins gets the trainer's weights as they are then."""

    @property
    def targets(self) -> Collection[str]:
        """URLs of the servers of the last publication."""

    @property
    def serving(self) -> Serving: ...

    async def prepare(self) -> None:
        """A publication begins. Raises RuntimeError where no server is left."""

    async def publish(self, version: int, urls: Collection[str]) -> PublishReport:
        """Publishes to some of the targets."""

    async def join(self, version: int, urls: Collection[str]) -> PublishReport:
        """Publishes to servers that were started since, by one full load."""

    def leave_out(self, faults: Sequence[ServerFault]) -> None:
        """Sends these servers no further request until they are verified."""

    def fail(self, faults: Sequence[ServerFault]) -> None:
        """Others are started in the place of these servers."""

    def verified(self, urls: Collection[str], version: int) -> None:
        """These servers compute with the weights of `version`."""

    async def settled(self) -> None:
        """A publication is over. From now on further servers may join, by `RunChecks.join`; returns once one serves."""

    async def close(self) -> None:
        """The trainer's weights will change: no server joins until `settled`."""

    def metrics(self) -> Mapping[str, float]: ...


@dataclass(slots=True, kw_only=True)
class RunChecks:
    """The checks of one run. Each comparison samples `check_prompts` of `prompts`; the step and the attempt determine
    which.

    known: the text that servers score after each publication; None: they are not asked. republish: publishes the
    trainer's weights again as the version that is given. turns: servers and trainer take turns, so that the servers get
    the weights once more after the trainer was asked. fleet: replaces servers that a publication left out or that do
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
    fleet: Fleet | None = None
    _published: _Held = field(default=())
    _served: tuple[int, PublishReport | None] = field(default=(0, None), init=False)  # version, how it was published
    _beside_training: bool = field(default=False, init=False)
    _times: int = field(default=0, init=False)  # that the version was published
    _republished: int = field(default=0, init=False)  # publications beside the first ones, since the last metrics

    async def before_publication(self) -> None:
        """Call with the weights that the publication will send."""
        if self.fleet is not None:
            await self.fleet.prepare()
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
            found = await self._of(step).short(self.clients, flush=True, serving=self._serving)
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

        Servers that do not compute with the published weights are published to once more, then replaced, while the
        others go on. Raises RuntimeError naming them where none may be replaced or too few are left, and naming step
        and causes
        when two comparisons of different samples both exceed what the precision explains; a rare near-tie exceeds it in
        one comparison only."""
        self._times, self._beside_training = 1, beside_training
        whole, figures = await self._settle(step, report)
        if self.check_prompts and self.check_every and not step % self.check_every:
            await self._compare(step)
            whole, figures = await self._settle(step, whole)  # with turns the comparison has published once more
        assert whole is not None, "of a publication"
        await self._note(step, whole)
        figures["sync/republications"], self._republished = float(self._republished), 0
        return whole, figures | ({} if self.fleet is None else dict(self.fleet.metrics()))

    async def _compare(self, step: int) -> None:
        found: list[Report] = []
        for attempt in range(2):
            found.append(await self._of(step, attempt).short(self.clients, flush=self.idle, serving=self._serving))
            if found[-1].ok:
                return
        raise RuntimeError(
            f"after step {step} trainer and rollout differ: {found[-1].sentence()}. Two comparisons of "
            f"{self.check_prompts} prompts failed; nothing of this step is saved: `miles-like verify` diagnoses "
            "the difference, and --resume continues from the latest checkpoint"
        )

    @property
    def _serving(self) -> Serving | None:
        """The servers on which a comparison samples; None: on all."""
        return None if self.fleet is None else self.fleet.serving

    async def before_training(self, step: int) -> None:
        """Raises RuntimeError naming server and tensors when a server's weights are not those published last. Checks
        only every `checksums_every` steps."""
        if self.fleet is not None and self.fleet.needs_trainer:
            await self.fleet.close()
        if not (self._due(step) and self._published):
            return
        for client, held in await self._held():
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
        wrong, gap = await self._wrong(self._targets - {f.url for f in faults})
        faults += wrong
        if self.fleet is not None:  # what a server computes with other weights would be trained
            self.fleet.leave_out([f for f in faults if f.answers])
            self.fleet.fail([f for f in faults if not f.answers])
        if any(f.answers for f in faults):
            report, faults, gap = await self._again(step, report, faults)
        if self.fleet is None and faults:
            raise RuntimeError(self._refusal(step, faults))
        if self.fleet is not None:
            self._served = step, report
            self.fleet.fail(faults)
            self.fleet.verified(self._targets - {f.url for f in faults}, step)
            await self.fleet.settled()
        return report, {} if self.known is None else {"mismatch/known_answer": gap}

    @property
    def _targets(self) -> set[str]:
        """The servers of the last publication."""
        return {c.url for c in self.clients} if self.fleet is None else set(self.fleet.targets)

    async def _again(
        self, step: int, report: PublishReport | None, faults: Sequence[ServerFault]
    ) -> tuple[PublishReport, list[ServerFault], float]:
        """Publishes once more, to all servers that answer. Returns the report of all that was sent of the version,
        the servers that still do not compute with it, and the greatest gap of the others."""
        again = " again" if self._times else ""
        text = f"version {step} is published{again}: {'; '.join(f.why for f in faults if f.answers)}"
        self.console.print(f"{'':12}{text}", markup=False, soft_wrap=True)
        dead = [f for f in faults if not f.answers]
        there = self._targets - {f.url for f in dead}
        later = await (self.republish(step) if self.fleet is None else self.fleet.publish(step, there))
        self._times, self._republished = self._times + 1, self._republished + 1
        wrong, gap = await self._wrong(there - {f.url for f in later.failed})
        return later if report is None else report.followed_by(later), [*dead, *later.failed, *wrong], gap

    async def join(self, urls: Collection[str]) -> list[ServerFault]:
        """Brings servers up to the current version, and lets those serve that are shown to compute with it. Returns
        what is wrong with the others. Raises RuntimeError or ValueError as a publication."""
        assert self.fleet is not None, "servers join a fleet"
        step, report = self._served
        # the weights that no publication has sent are those with which servers start
        joined = None if report is None else await self.fleet.join(step, urls)
        failed = [] if joined is None else list(joined.failed)
        beside, self._beside_training = self._beside_training, not self.fleet.needs_trainer
        wrong, _ = await self._wrong(set(urls) - {f.url for f in failed})
        self._beside_training = beside
        failed += wrong
        right = set(urls) - {f.url for f in failed}
        if report and joined and report.checksums and joined.checksums and report.checksums != joined.checksums:
            which = ", ".join(differing(report.checksums, joined.checksums)[:3])
            failed += [
                ServerFault(url, f"server {url} has different weights from the others ({which})", True)
                for url in sorted(right)
            ]
            right = set()
        self.fleet.verified(right, step)
        return failed

    def _refusal(self, step: int, faults: Sequence[ServerFault]) -> str:
        times = {1: "once", 2: "twice"}.get(self._times, f"{self._times} times")
        scored = "" if self.known is None else f" (median of {len(self.known.text) - 1} tokens that all servers score)"
        bound = " Servers are not replaced while servers and trainer take turns." if self.turns else ""
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
            own = [] if report and report.checksums else [held for _, held in await self._held() if held is not None]
            self._published = report.checksums if report and report.checksums else next(iter(own), ())

    async def _held(self) -> list[tuple[ServerClient, _Held | None]]:
        """Of each server that serves; None for one that does not answer."""

        async def held(client: ServerClient) -> tuple[ServerClient, _Held | None]:
            try:
                return client, (await client.checksum()).per_rank
            except ServerLost:
                if self.fleet is None:
                    raise
                return client, None

        asked = [c for c in self.clients if self.fleet is None or c in self.fleet.serving]
        return list(await asyncio.gather(*map(held, asked)))

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

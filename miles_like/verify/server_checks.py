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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console

from miles_like.types import Prompt, PublishReport
from miles_like.verify.gate import check_before_start
from miles_like.verify.known_answer import KnownAnswer
from miles_like.verify.live import Comparison
from miles_like.verify.report import Report
from rollout.seeds import seed_of
from rollout.sglang.client import SGLangClient

_Held = Sequence[Mapping[str, str]]  # of each rank of a server: tensor name -> hash


@dataclass(slots=True, kw_only=True)
class RunChecks:
    """The checks of one run. Each comparison samples `check_prompts` of `prompts`; the step and the attempt determine
    which.

    known: the text that servers score after each publication; None: they are not asked. republish: publishes the
    trainer's weights again as the version that is given.
    comparison: the settings of a comparison; its prompts and its seed are replaced. idle: whether the servers have no
    request in flight after a publication; their caches are then emptied again.
    """

    clients: Sequence[SGLangClient]
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
    _published: _Held = field(default=())

    async def before_publication(self) -> None:
        """Call with the weights that the publication will send."""
        if self.known is not None:
            await self.known.expect()

    async def at_start(self, step: int, report: PublishReport | None) -> None:
        """Call before the first step of a process, and `before_publication` before it, also where nothing is published.
        Raises ValueError, naming the causes, where the sides differ by more than the precision explains, and
        RuntimeError as `published`."""
        await self._note(step, report)
        if report is not None:
            await self._ask(step)
        if self.check_prompts:
            began = time.perf_counter()
            found = await self._of(step).short(self.clients, flush=True)
            check_before_start(found, self.console, time.perf_counter() - began)
        if report is None or self.check_prompts:  # with turns the comparison has published once more
            await self._ask(step)

    async def published(self, step: int, report: PublishReport) -> Mapping[str, float]:
        """Call after the publication of `step` trained steps. Returns metrics.

        Servers that do not compute with the published weights are published to once more. Raises RuntimeError naming
        them when they still do not, and naming step and causes when two comparisons of different samples both exceed
        what the precision explains; a rare near-tie exceeds it in one comparison only."""
        await self._note(step, report)
        figures = await self._ask(step)
        if not (self.check_prompts and self.check_every) or step % self.check_every:
            return figures
        found: list[Report] = []
        for attempt in range(2):
            found.append(await self._of(step, attempt).short(self.clients, flush=self.idle))
            if found[-1].ok:
                return await self._ask(step)  # with turns the comparison has published once more
        raise RuntimeError(
            f"after step {step} trainer and rollout differ: {found[-1].sentence()}. Two comparisons of "
            f"{self.check_prompts} prompts failed; nothing of this step is saved: `miles-like verify` attributes the "
            "gap to its causes, --resume goes on from the last checkpoint"
        )

    async def before_training(self, step: int) -> None:
        """Raises RuntimeError naming server and tensors when a server's weights are not those published last. Checks
        only every `checksums_every` steps."""
        if not (self._due(step) and self._published):
            return
        for client, held in zip(self.clients, await self._held(), strict=True):
            if wrong := differing(self._published, held):
                shown = f"{', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}"
                raise RuntimeError(
                    f"step {step + 1}: server {client.url} holds other weights than were published to it as version "
                    f"{step}: {len(wrong)} tensors differ ({shown}). Its samples are not trained: check that machine's "
                    "memory and what else publishes to the server; --resume continues from the last checkpoint"
                )

    async def _ask(self, step: int) -> Mapping[str, float]:
        """Let every server score the known text."""
        if self.known is None:
            return {}
        wrong, gap = await self.known.compare(self.clients)
        if wrong:
            described = "; ".join(w.sentence() for w in wrong)
            self.console.print(f"{'':12}version {step} is published again: {described}", markup=False, soft_wrap=True)
            await self._note(step, await self.republish(step))
            wrong, gap = await self.known.compare(self.clients)
        if wrong:
            described = "; ".join(w.sentence() for w in wrong)
            raise RuntimeError(
                f"version {step} was published twice, and servers do not compute with it: {described} (median of "
                f"{len(self.known.text) - 1} tokens that all servers score). No sample of it is trained: `miles-like "
                "verify` names tensors and layers, --resume goes on from the last checkpoint"
            )
        return {"mismatch/known_answer": gap}

    def _due(self, step: int) -> bool:
        return bool(self.checksums_every) and (step + 1) % self.checksums_every == 0

    async def _note(self, step: int, report: PublishReport | None) -> None:
        """Record the checksums that the servers must still have before the next step trains."""
        self._published = ()
        if self._due(step):
            self._published = (report.checksums if report else ()) or (await self._held())[0]

    async def _held(self) -> list[_Held]:
        return [reply.per_rank for reply in await asyncio.gather(*(c.checksum() for c in self.clients))]

    def _of(self, step: int, attempt: int = 0) -> Comparison:
        n = self.check_prompts
        first = (step * n + attempt * n) % len(self.prompts)
        chosen = [*self.prompts[first:], *self.prompts[:first]][:n]
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

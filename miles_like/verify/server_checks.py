"""Checks of a training run's servers between two steps: checksums of their weights, and their log-probabilities and
routes against the trainer's on newly sampled text.

Call `RunChecks.published` after a publication and before the next training. Call `RunChecks.before_training` between a
step's rollout and its training: if a server's weights changed after the publication, its samples are rejected before
any weight is trained on them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console

from miles_like.types import Prompt, PublishReport
from miles_like.verify.gate import check_before_start
from miles_like.verify.live import Comparison
from miles_like.verify.report import Report
from rollout.seeds import seed_of
from rollout.sglang.client import SGLangClient

_Held = Sequence[Mapping[str, str]]  # of each rank of a server: tensor name -> hash


@dataclass(slots=True, kw_only=True)
class RunChecks:
    """The checks of one run. Each comparison samples `check_prompts` of `prompts`; the step and the attempt determine
    which.

    comparison: the settings of a comparison; its prompts and its seed are replaced. idle: whether the servers have no
    request in flight after a publication; their caches are then emptied again.
    """

    clients: Sequence[SGLangClient]
    comparison: Comparison
    prompts: Sequence[Prompt]
    check_prompts: int
    check_every: int  # steps; 0: only `at_start`
    checksums_every: int  # steps; 0: never
    seed: int
    idle: bool
    console: Console
    _published: _Held = field(default=())

    async def at_start(self, step: int, report: PublishReport | None) -> None:
        """Call before the first step of a process. Raises ValueError, naming the causes, where the sides differ by more
        than the precision explains."""
        await self._note(step, report)
        if self.check_prompts:
            began = time.perf_counter()
            found = await self._of(step).short(self.clients, flush=True)
            check_before_start(found, self.console, time.perf_counter() - began)

    async def published(self, step: int, report: PublishReport) -> None:
        """Call after the publication of `step` trained steps. Raises RuntimeError naming step and causes when two
        comparisons of different samples both exceed what the precision explains; a rare near-tie exceeds it in one
        comparison only."""
        await self._note(step, report)
        if not (self.check_prompts and self.check_every) or step % self.check_every:
            return
        found: list[Report] = []
        for attempt in range(2):
            found.append(await self._of(step, attempt).short(self.clients, flush=self.idle))
            if found[-1].ok:
                return
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

"""One step's worth of groups: prompts are dealt and answered, and in further rounds replaced where a group is left out.

Dynamic sampling (DAPO, arXiv:2503.14476, 3.2) is a filter that leaves out groups whose rewards are all equal. A group
none of whose samples could be scored is left out by every run. A further round samples as many prompts as are likely to
fill the step, by the share that was kept so far; what comes out of it too much is not trained.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from miles_like.buffer import DataBuffer
from miles_like.types import Prompt, SampleGroup

UNSCORED = "no sample was scored"
SURPLUS = "more than the step needs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    """What became of the prompts of one step."""

    groups: int  # put into the buffer
    dealt: int  # prompts that the source has dealt since the run's first step
    metrics: Mapping[str, float]


@dataclass(kw_only=True)
class Rounds:
    """Fills the buffer with `groups` groups a step."""

    groups: int
    buffer: DataBuffer
    next_prompts: Callable[[int], Sequence[Prompt]]  # so many
    # (step, round, prompts) -> sampled and scored; rounds count from 0
    rollout: Callable[[int, int, Sequence[Prompt]], Awaitable[Sequence[SampleGroup]]]
    refuse: Callable[[SampleGroup], str | None] = lambda group: None  # the reason to leave a group out
    shape: Callable[[SampleGroup], SampleGroup] = lambda group: group  # other rewards for what was not left out
    max_rounds: int = 1
    dealt: int = 0

    async def produce(self, step: int) -> Produced:
        """Raises RuntimeError when the last round ends with too few groups: to train on fewer would be another run."""
        kept, sampled, left_out = 0, list[SampleGroup](), Counter[str]()
        for number in range(self.max_rounds):
            prompts = self.next_prompts(self._likely(self.groups - kept, kept, len(sampled)))
            self.dealt += len(prompts)
            tickets = [self.buffer.admit() for _ in prompts]
            groups = await self.rollout(step, number, prompts)
            sampled += groups
            for ticket, group in zip(tickets, groups, strict=True):
                reason = self.refuse(group) if group.samples else _why_empty(group)
                if reason is not None:
                    left_out[reason] += 1
                elif kept == self.groups:
                    reason = SURPLUS
                if reason is not None:
                    await self.buffer.discard(ticket, reason=reason)
                else:
                    kept += 1
                    await self.buffer.put(ticket, self.shape(group))
            if kept == self.groups:
                return Produced(groups=kept, dealt=self.dealt, metrics=_metrics(sampled, left_out, number + 1))
        why = ", ".join(f"{n} {reason}" for reason, n in left_out.most_common())
        raise RuntimeError(
            f"step {step}: {kept} of {self.groups} groups after {self.max_rounds} rounds of sampling, "
            f"{left_out.total()} were left out ({why}): raise rollout.max_rounds, or change the filter or the prompts"
        )

    def _likely(self, missing: int, kept: int, sampled: int) -> int:
        """Prompts of which `missing` groups are kept, if they are like those sampled; at most a whole step's."""
        return min(math.ceil(missing * sampled / max(kept, 1)), self.groups) if sampled else missing


def _why_empty(group: SampleGroup) -> str:
    """With what most of its samples were given up for: of a server that is gone, this is where the run ends."""
    most = max(group.discarded, key=group.discarded.__getitem__, default=None)
    return UNSCORED if most is None else f"{UNSCORED}: {most}"


def _metrics(sampled: Sequence[SampleGroup], left_out: Counter[str], rounds: int) -> dict[str, float]:
    kept = sum(len(g.samples) for g in sampled)
    discarded = sum(n for g in sampled for n in g.discarded.values())
    return {
        "rollout/rounds": float(rounds),
        "rollout/filtered_frac": left_out.total() / len(sampled),
        "rollout/discarded_frac": discarded / max(kept + discarded, 1),
        "rollout/tokens": float(sum(s.response_len for g in sampled for s in g.samples)),
    }

"""The weighted sum of several rewards, each logged as a part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from miles_like.protocols import RewardFn
from miles_like.rewards.scorer import Outcome, together
from miles_like.types import Prompt, Sample, Score, Unit, Unscored

_WIDTH = list(Unit)  # from the narrowest unit to the widest


class Weighted:
    """rewards: name of the part -> (reward, weight). A sample that one of them cannot score is unscored, because a sum
    without that term would be another reward. A reward of weight 0 is only logged, and skipped for that sample."""

    def __init__(self, rewards: Mapping[str, tuple[RewardFn, float]]) -> None:
        self._rewards = dict(rewards)
        self.unit = max((r.unit for r, _ in self._rewards.values()), key=_WIDTH.index)
        self.slow = any(r.slow for r, _ in self._rewards.values())
        self.compares = next((r.compares for r, _ in self._rewards.values() if r.compares is not None), None)

    async def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Sequence[Outcome]:
        found = await together(_of(r, prompts, samples) for r, _ in self._rewards.values())
        return [self._sum(of_one) for of_one in zip(*found, strict=True)]

    async def close(self) -> None:
        for reward, _ in self._rewards.values():
            await reward.close()

    def _sum(self, outcomes: Sequence[Outcome]) -> Outcome:
        terms: list[float] = []
        parts: dict[str, float] = {}
        for (name, (_, weight)), outcome in zip(self._rewards.items(), outcomes, strict=True):
            if isinstance(outcome, Unscored):
                if not weight:
                    continue
                return Unscored(reason=f"{name}: {outcome.reason}")
            terms.append(weight * outcome.value)
            parts |= {name: outcome.value, **{f"{name}/{k}": v for k, v in outcome.parts.items()}}
        return Score(value=math.fsum(terms), parts=parts)


async def _of(reward: RewardFn, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Sequence[Outcome]:
    return await reward(prompts, samples)

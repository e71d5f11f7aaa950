"""Answers of the rollout servers to held-out prompts, and what they are worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from miles_like.metrics import eval_metrics
from miles_like.protocols import RewardFn, RolloutEngine
from miles_like.types import Prompt, SamplingParams
from rollout.episode import run_groups
from rollout.pool import EnginePool


class Examined(RolloutEngine, Protocol):
    async def flush_cache(self) -> None:
        """Forget all keys and values."""


async def evaluate(
    engines: Sequence[Examined],
    prompts: Sequence[Prompt],
    reward: RewardFn,
    *,
    n: int,
    params: SamplingParams,
    name: str,
    alone: bool,
) -> dict[str, float]:
    """`eval/{name}/...` of `n` answers to each prompt, of the whole distribution or, where n is 1,
    the best token each time. Nothing for no prompts.

    alone: nobody else samples meanwhile, and the engines then forget the prompts: which prefixes of the next rollout
    are cached changes last bits, so a run that goes on from a checkpoint must find what one that never stopped does.
    """
    if not prompts:
        return {}
    asked = dataclasses.replace(params, temperature=0.0 if n == 1 else params.temperature, top_p=1.0, top_k=-1)
    groups = await run_groups(EnginePool(engines), prompts, reward, n=n, params=asked)
    if alone:
        for engine in engines:
            await engine.flush_cache()
    return eval_metrics(groups, name=name)

"""Prompts -> scored groups: sample, then reward every sample at the same time.

Letters: G samples a prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from miles_like.protocols import RewardFn, RolloutEngine
from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams


async def run_groups(
    engine: RolloutEngine, prompts: Sequence[Prompt], reward: RewardFn, *, n: int, params: SamplingParams
) -> list[SampleGroup]:
    """One group of `n` scored samples for each prompt, in order.

    Raises RuntimeError naming prompt and sample when a sample came back aborted (its tokens are cut off by us, not
    chosen by the policy, so a reward would teach nonsense) or when the reward failed.
    """
    groups = await engine.generate(prompts, n=n, params=params)
    aborted = [s.name for g in groups for s in g.samples if s.finish is Finish.ABORT]
    if aborted:
        which = ", ".join(aborted[:3]) + (", ..." if len(aborted) > 3 else "")
        raise RuntimeError(
            f"{len(aborted)} samples came back aborted ({which}): "
            "something stopped them on the server; generate them again (publish.pause_mode = retract aborts none)"
        )
    tasks = [[asyncio.create_task(_score(reward, g.prompt, s)) for s in g.samples] for g in groups]
    flat = [t for row in tasks for t in row]
    try:
        await asyncio.gather(*flat)
    finally:
        for t in flat:
            t.cancel()
    return [
        dataclasses.replace(g, samples=tuple(t.result() for t in row)) for g, row in zip(groups, tasks, strict=True)
    ]


async def _score(reward: RewardFn, prompt: Prompt, sample: Sample) -> Sample:
    try:
        value = await reward(prompt, sample)
    except Exception as e:  # a reward is the user's code: whatever it raises, say what it was given
        raise RuntimeError(
            f"reward of prompt {prompt.id!r}, sample {sample.index} failed: {type(e).__name__}: {e}; "
            f"the answer was {prompt.answer!r}, the response {sample.text[:200]!r}"
        ) from e
    if not isinstance(value, int | float) or value != value:
        raise RuntimeError(f"reward of prompt {prompt.id!r}, sample {sample.index} is {value!r}, want a number")
    return dataclasses.replace(sample, reward=float(value))

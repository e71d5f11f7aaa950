"""Prompts -> scored groups: sample, let what was aborted go on, and score what has ended."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from miles_like.protocols import RewardFn, RolloutEngine
from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams, Score, Unit, Unscored
from rollout.together import all_or_first_error
from rollout.unaborted import RESUMES, ended


async def run_groups(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    reward: RewardFn,
    *,
    n: int,
    params: SamplingParams,
    resumes: int = RESUMES,
) -> list[SampleGroup]:
    """One group for each prompt, in order, of its scored samples: `n`, less those that could not be scored.

    Those are counted in the group's `discarded`, by reason. A group may come back with no sample at all: whoever trains
    leaves it out and samples another prompt (rounds.py).

    A sample that came back aborted goes on from its tokens, on any engine and under whatever weights it serves by then,
    at most `resumes` times: a partial rollout. With the same seed and weights it is the sample that was never aborted.
    A slow reward is asked about a prompt's samples while other prompts are still sampled. Whatever is asked when, the
    groups are the same.

    Raises RuntimeError naming prompt and sample when one was aborted once more (its tokens are cut off by us, not
    chosen by the policy, so a reward would teach nonsense) or when the reward failed.
    """
    apart = reward.slow and reward.unit is not Unit.BATCH  # a request for each prompt: one that is done can be scored
    shares = [[p] for p in prompts] if apart else [prompts]
    done = await all_or_first_error(_share(engine, share, reward, n, params, resumes) for share in shares)
    return [group for groups in done for group in groups]


async def _share(
    engine: RolloutEngine, prompts: Sequence[Prompt], reward: RewardFn, n: int, params: SamplingParams, resumes: int
) -> list[SampleGroup]:
    groups = await engine.generate(prompts, n=n, params=params)
    pairs = [[(g.prompt, s) for s in g.samples] for g in groups]
    if reward.unit is Unit.SAMPLE:
        pairs = [[pair] for of_prompt in pairs for pair in of_prompt]
    elif reward.unit is Unit.BATCH:
        pairs = [[pair for of_prompt in pairs for pair in of_prompt]]
    whole = partial(ended, engine, params=params, resumes=resumes)
    done = await all_or_first_error(_scored(reward, together, whole) for together in pairs)
    found = iter([sample for samples in done for sample in samples])
    return [_group(g, [next(found) for _ in g.samples]) for g in groups]


async def _scored(
    reward: RewardFn, pairs: Sequence[tuple[Prompt, Sample]], whole: Callable[[Sample], Coroutine[Any, Any, Sample]]
) -> list[Sample | Unscored]:
    """With reward and parts, when all have ended; or why there is none."""
    samples = await all_or_first_error(whole(s) for _, s in pairs)
    # an environment or a generate function may have said what some are worth
    todo = [i for i, s in enumerate(samples) if s.reward is None]
    outcomes = await reward([pairs[i][0] for i in todo], [samples[i] for i in todo]) if todo else ()
    out: list[Sample | Unscored] = list(samples)
    for i, o in zip(todo, outcomes, strict=True):
        found = isinstance(o, Score)
        out[i] = dataclasses.replace(samples[i], reward=o.value, reward_parts=o.parts) if found else o
    return out


def _group(group: SampleGroup, found: Sequence[Sample | Unscored]) -> SampleGroup:
    reasons = Counter(o.reason for o in found if isinstance(o, Unscored))
    kept = tuple(s for s in found if isinstance(s, Sample))
    return dataclasses.replace(group, samples=kept, discarded=dict(Counter(group.discarded) + reasons))

"""Prompts -> scored groups: sample, let what was aborted go on, and score what has ended."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from miles_like.protocols import RewardFn, RolloutEngine
from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams, Score, Unit, Unscored
from rollout.together import all_or_first_error, as_they_end
from rollout.unaborted import RESUMES, ended


async def groups_as_they_end(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    reward: RewardFn,
    *,
    n: int,
    params: SamplingParams,
    resumes: int = RESUMES,
    apart: bool = False,
) -> AsyncGenerator[tuple[int, SampleGroup], None]:
    """Which prompt, and the group of its scored samples: `n`, less those that could not be scored.

    Those are counted in the group's `discarded`, by reason. A group may come back with no sample at all: whoever trains
    leaves it out and samples another prompt.

    A sample that came back aborted goes on from its tokens, on any engine and under whatever weights it serves by then:
    a partial rollout (`ended`). With the same seed and weights it is the sample that was never aborted.

    apart: each prompt in a request of its own, so that it ends by itself; so it is with a slow reward, which is then
    asked while other prompts are still sampled. Else all are sampled in requests of several and come when the last of
    them has ended. A reward that must see all of them at once is given all, and they come together. Whatever is asked
    when, the groups are the same.

    Closed early (contextlib.aclosing) or cancelled, it cancels what it asked for and leaves no task behind; a server
    may go on for a moment, which `engine.abort_all` ends.

    Raises RuntimeError naming prompt and sample when a server aborts without end (its tokens are cut off by us, not
    chosen by the policy, so a reward would teach nonsense) or when the reward failed.
    """
    whole = partial(ended, engine, params=params, resumes=resumes)

    async def one(i: int, group: SampleGroup) -> tuple[int, SampleGroup]:
        return i, (await _scored_groups(reward, [group], whole))[0]

    async def alone(i: int, prompt: Prompt) -> tuple[int, SampleGroup]:
        (group,) = await engine.generate([prompt], n=n, params=params)
        return await one(i, group)

    if reward.unit is Unit.BATCH:
        groups = await engine.generate(prompts, n=n, params=params)
        for i, group in enumerate(await _scored_groups(reward, groups, whole)):
            yield i, group
        return
    if apart or reward.slow:
        calls = [alone(i, p) for i, p in enumerate(prompts)]
    else:
        calls = [one(i, g) for i, g in enumerate(await engine.generate(prompts, n=n, params=params))]
    async with aclosing(as_they_end(calls)) as found:
        async for pair in found:
            yield pair


async def run_groups(
    engine: RolloutEngine, prompts: Sequence[Prompt], reward: RewardFn, *, n: int, params: SamplingParams, **how: Any
) -> list[SampleGroup]:
    """`groups_as_they_end`, all of them, in the order of `prompts`."""
    async with aclosing(groups_as_they_end(engine, prompts, reward, n=n, params=params, **how)) as groups:
        found = {i: group async for i, group in groups}
    return [found[i] for i in range(len(prompts))]


async def _scored_groups(
    reward: RewardFn, groups: Sequence[SampleGroup], whole: Callable[[Sample], Coroutine[Any, Any, Sample]]
) -> list[SampleGroup]:
    """When all their samples have ended and been asked about, in as large parts as the reward must see."""
    pairs = [[(g.prompt, s) for s in g.samples] for g in groups]
    if reward.unit is Unit.SAMPLE:
        pairs = [[pair] for of_prompt in pairs for pair in of_prompt]
    elif reward.unit is Unit.BATCH:
        pairs = [[pair for of_prompt in pairs for pair in of_prompt]]
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

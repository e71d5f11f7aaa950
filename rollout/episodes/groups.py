"""Prompts -> scored groups: sample, resume aborted samples, and score complete ones."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

from miles_like import spans
from miles_like.protocols import RewardFn, RolloutEngine
from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams, Score, Unit, Unscored
from rollout.concurrency import all_or_first_error, as_completed
from rollout.episodes.resuming import RESUMES, resume_until_ended

_Resume: TypeAlias = Callable[[Sample], Coroutine[Any, Any, Sample]]


async def groups_as_completed(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    reward: RewardFn,
    *,
    n: int,
    params: SamplingParams,
    resumes: int = RESUMES,
    prompt_per_request: bool = False,
) -> AsyncGenerator[tuple[int, SampleGroup], None]:
    """Pairs (index of the prompt, group of its `n` scored samples), each as soon as it is complete.

    Samples that could not be scored are not in the group; its `discarded` counts them by reason. A group may be empty:
    the trainer then discards it and another prompt is sampled.

    An aborted sample is continued from its tokens, on any engine and under the weights that engine serves at that time:
    a partial rollout (`resume_until_ended`). With the same seed and weights the result equals an uninterrupted sample.

    prompt_per_request: send each prompt in a separate request, so that groups are complete at different times. A slow
    reward implies it, so that groups are scored while other prompts are still sampled. Otherwise requests hold several
    prompts and all groups are complete with the last one. A reward of Unit.BATCH is called once with all groups. The
    groups are the same in all three cases.

    If closed early (contextlib.aclosing) or cancelled, it cancels its requests and leaves no task behind; the server
    may continue for a moment, until `engine.abort_all`.

    Raises RuntimeError naming prompt and sample when a server aborts a sample again and again (the tokens were cut off,
    not chosen by the policy, so a reward for them would be wrong) or when the reward function failed.
    """
    resume = partial(resume_until_ended, engine, params=params, resumes=resumes)

    async def score(i: int, group: SampleGroup) -> tuple[int, SampleGroup]:
        return i, (await _scored_groups(reward, [group], resume))[0]

    async def sample_and_score(i: int, prompt: Prompt) -> tuple[int, SampleGroup]:
        (group,) = await _generated(engine, [prompt], n, params)
        return await score(i, group)

    if reward.unit is Unit.BATCH:
        groups = await _generated(engine, prompts, n, params)
        for i, group in enumerate(await _scored_groups(reward, groups, resume)):
            yield i, group
        return
    if prompt_per_request or reward.slow:
        calls = [sample_and_score(i, p) for i, p in enumerate(prompts)]
    else:
        calls = [score(i, g) for i, g in enumerate(await _generated(engine, prompts, n, params))]
    async with aclosing(as_completed(calls)) as pairs:
        async for pair in pairs:
            yield pair


async def _generated(
    engine: RolloutEngine, prompts: Sequence[Prompt], n: int, params: SamplingParams
) -> Sequence[SampleGroup]:
    with spans.beside("generate") as span:
        groups = await engine.generate(prompts, n=n, params=params)
        if spans.on():
            samples = [s for g in groups for s in g.samples]
            span.add(samples=[s.name for s in samples], versions=_versions(samples))
            span.add(tokens=[s.response_len for s in samples])
    return groups


def _versions(samples: Sequence[Sample]) -> list[int]:
    """The weight versions that sampled them."""
    return sorted({v.version for s in samples for v in s.versions})


async def run_groups(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    reward: RewardFn,
    *,
    n: int,
    params: SamplingParams,
    resumes: int = RESUMES,
    prompt_per_request: bool = False,
) -> list[SampleGroup]:
    """All groups of `groups_as_completed`, in the order of `prompts`."""
    groups = groups_as_completed(
        engine, prompts, reward, n=n, params=params, resumes=resumes, prompt_per_request=prompt_per_request
    )
    async with aclosing(groups):
        by_index = {i: group async for i, group in groups}
    return [by_index[i] for i in range(len(prompts))]


async def _scored_groups(reward: RewardFn, groups: Sequence[SampleGroup], resume: _Resume) -> list[SampleGroup]:
    """Resume and score all samples, in calls of the unit that the reward function needs. Of an episode of several rows
    the last one is scored."""
    calls = [[(g.prompt, rows[-1]) for rows in g.rows] for g in groups]
    if reward.unit is Unit.SAMPLE:
        calls = [[pair] for pairs in calls for pair in pairs]
    elif reward.unit is Unit.BATCH:
        calls = [[pair for pairs in calls for pair in pairs]]
    done = await all_or_first_error(_scored(reward, pairs, resume) for pairs in calls)
    outcomes = iter([outcome for call in done for outcome in call])
    return [with_outcomes(g, [next(outcomes) for _ in g.episodes]) for g in groups]


async def _scored(reward: RewardFn, pairs: Sequence[tuple[Prompt, Sample]], resume: _Resume) -> list[Sample | Unscored]:
    """One call of the reward function, for the samples without a reward."""
    samples = await all_or_first_error(resume(s) for _, s in pairs)
    # an environment or a generate function may have set some rewards
    todo = [i for i, s in enumerate(samples) if s.reward is None]
    scores: Sequence[Score | Unscored] = ()
    if todo:
        with spans.beside("reward") as span:
            if spans.on():
                span.add(samples=[samples[i].name for i in todo], versions=_versions([samples[i] for i in todo]))
            scores = await reward([pairs[i][0] for i in todo], [samples[i] for i in todo])
    out: list[Sample | Unscored] = list(samples)
    for i, score in zip(todo, scores, strict=True):
        if isinstance(score, Score):
            out[i] = dataclasses.replace(samples[i], reward=score.value, reward_parts=score.parts)
        else:
            out[i] = score
    return out


def with_outcomes(group: SampleGroup, outcomes: Sequence[Sample | Unscored]) -> SampleGroup:
    """The group with what has become of its episodes, of each its last row: the rows before it get the same reward.
    Episodes that are lost are counted by reason."""
    reasons, kept = Counter(o.reason for o in outcomes if isinstance(o, Unscored)), list[Sample]()
    for rows, last in zip(group.rows, outcomes, strict=True):
        if isinstance(last, Sample):
            reward, parts = last.reward, last.reward_parts
            kept += [*(dataclasses.replace(s, reward=reward, reward_parts=parts) for s in rows[:-1]), last]
    return dataclasses.replace(group, samples=tuple(kept), discarded=dict(Counter(group.discarded) + reasons))

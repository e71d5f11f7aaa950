"""Prompts -> scored groups: sample, let what was aborted go on, and score what has ended."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from miles_like.protocols import RewardFn, RolloutEngine
from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams, Unit, Unscored
from rollout.together import all_or_first_error

# A sample that is aborted still more often than anybody had a reason to is on a server that ends all it is given.
RESUMES = 3


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
    ended = partial(_ended, engine, params=params, resumes=resumes)
    done = await all_or_first_error(_scored(reward, together, ended) for together in pairs)
    found = iter([sample for samples in done for sample in samples])
    return [_group(g, [next(found) for _ in g.samples]) for g in groups]


async def _scored(
    reward: RewardFn, pairs: Sequence[tuple[Prompt, Sample]], ended: Callable[[Sample], Coroutine[Any, Any, Sample]]
) -> list[Sample | Unscored]:
    """With reward and parts, when all have ended; or why there is none."""
    samples = await all_or_first_error(ended(s) for _, s in pairs)
    outcomes = await reward([p for p, _ in pairs], samples)
    return [
        o if isinstance(o, Unscored) else dataclasses.replace(s, reward=o.value, reward_parts=o.parts)
        for s, o in zip(samples, outcomes, strict=True)
    ]


def _group(group: SampleGroup, found: Sequence[Sample | Unscored]) -> SampleGroup:
    reasons = Counter(o.reason for o in found if isinstance(o, Unscored))
    kept = tuple(s for s in found if isinstance(s, Sample))
    return dataclasses.replace(group, samples=kept, discarded=dict(Counter(group.discarded) + reasons))


async def _ended(engine: RolloutEngine, sample: Sample, *, params: SamplingParams, resumes: int) -> Sample:
    """`sample` when it has ended by itself. Raises RuntimeError when the last of `resumes` attempts was aborted too."""
    for _ in range(resumes):
        sample = _as_it_ended(sample, params)
        if sample.finish is not Finish.ABORT:
            return sample
        left = params.max_new_tokens - sample.response_len
        sample = await engine.continue_sample(sample, params=dataclasses.replace(params, max_new_tokens=left))
    sample = _as_it_ended(sample, params)
    if sample.finish is Finish.ABORT:
        raise RuntimeError(
            f"sample {sample.name} came back aborted {resumes + 1} times: something stops it on the server; see its "
            "log for who sends it /abort_request"
        )
    return sample


def _as_it_ended(sample: Sample, params: SamplingParams) -> Sample:
    """A stock server that is told to abort says so also of a request whose last token came in the same step."""
    if sample.finish is not Finish.ABORT or not sample.response_len:
        return sample
    if int(sample.token_ids[-1]) in params.stop_token_ids:
        return dataclasses.replace(sample, finish=Finish.STOP)
    full = sample.response_len >= params.max_new_tokens
    return dataclasses.replace(sample, finish=Finish.LENGTH) if full else sample

"""Prompts -> scored groups: sample, let what was aborted go on, then reward every sample at the same time.

Letters: G samples a prompt.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from miles_like.protocols import RewardFn, RolloutEngine
from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams
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
    """One group of `n` scored samples for each prompt, in order.

    A sample that came back aborted goes on from its tokens, on any engine and under whatever weights it serves by then,
    at most `resumes` times: a partial rollout. With the same seed and weights it is the sample that was never aborted.
    Raises RuntimeError naming prompt and sample when one was aborted once more (its tokens are cut off by us, not
    chosen by the policy, so a reward would teach nonsense) or when the reward failed.
    """
    groups = await engine.generate(prompts, n=n, params=params)
    samples = await all_or_first_error(_ended(engine, s, params, resumes) for g in groups for s in g.samples)
    aborted = [s.name for s in samples if s.finish is Finish.ABORT]
    if aborted:
        which = ", ".join(aborted[:3]) + (", ..." if len(aborted) > 3 else "")
        raise RuntimeError(
            f"{len(aborted)} samples came back aborted {resumes + 1} times ({which}): "
            "something stops them on the server; see its log for who sends it /abort_request"
        )
    asked = [g.prompt for g in groups for _ in g.samples]
    scored = iter(await all_or_first_error(_score(reward, p, s) for p, s in zip(asked, samples, strict=True)))
    return [dataclasses.replace(g, samples=tuple(itertools.islice(scored, len(g.samples)))) for g in groups]


async def _ended(engine: RolloutEngine, sample: Sample, params: SamplingParams, resumes: int) -> Sample:
    """`sample` when it has ended by itself, or as the last of `resumes` attempts left it."""
    for _ in range(resumes):
        sample = _as_it_ended(sample, params)
        if sample.finish is not Finish.ABORT:
            break
        left = params.max_new_tokens - sample.response_len
        sample = await engine.continue_sample(sample, params=dataclasses.replace(params, max_new_tokens=left))
    return _as_it_ended(sample, params)


def _as_it_ended(sample: Sample, params: SamplingParams) -> Sample:
    """A stock server that is told to abort says so also of a request whose last token came in the same step."""
    if sample.finish is not Finish.ABORT or not sample.response_len:
        return sample
    if int(sample.token_ids[-1]) in params.stop_token_ids:
        return dataclasses.replace(sample, finish=Finish.STOP)
    full = sample.response_len >= params.max_new_tokens
    return dataclasses.replace(sample, finish=Finish.LENGTH) if full else sample


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

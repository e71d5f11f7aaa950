"""A custom generate function: the policy answers, then sees its answer again and may give a better one.

    [rollout]
    generate = "./generate.py:twice"   # relative to the configuration; or an installed module, my_package.turns:twice
    max_new_tokens = 32                # in `params`: of one call
    max_episode_tokens = 80            # of all that a sample has after its prompt; left out: max_new_tokens

Where the turns are a conversation with something that answers, an environment (environment.py) needs less code. A
generate function decides itself what is asked of the engine, and may make samples that depend on each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from miles_like.protocols import GenerateFn, RolloutEngine
from miles_like.types import Finish, Prompt, Sample, SamplingParams

AGAIN = (3,)  # the tokens between the two turns: a newline in configs/tiny; a tokenizer of yours knows better


async def twice(engine: RolloutEngine, prompt: Prompt, *, n: int, params: SamplingParams) -> Sequence[Sample]:
    """Protocol: GenerateFn. `n` samples with index 0 .. n-1, each with the prompt's tokens first.

    Samples come from the engine, which fills in tokens, log-probs, routes and weight versions. `continue_sample` adds
    tokens that are not under loss and what the policy says then. Nothing comes back aborted. A sample whose `reward` is
    set is not scored any more.
    """
    (group,) = await engine.generate([prompt], n=n, params=params)

    async def second(sample: Sample) -> Sample:
        if sample.finish is Finish.LENGTH:
            return sample  # it did not end its first answer
        return await engine.continue_sample(sample, AGAIN, params=params)

    return await asyncio.gather(*(second(s) for s in group.samples))


_: GenerateFn = twice  # mypy holds it to its Protocol here

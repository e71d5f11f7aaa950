"""A custom reward: right answers, slightly less for long ones, with both parts in the log.

    [reward]
    name = "./reward.py:short_and_right"   # relative to the configuration; or, installed, my_package.rewards:f

By the names of its parameters a function is asked of a sample (prompt, sample), of all samples of a prompt (prompt,
samples) or of several prompts (prompts, samples): Protocols SampleReward, GroupReward and BatchReward. It may be async,
and must be where it waits for something. docs/rewards.md has all that it may give, time limits, retries, and the
signatures of other frameworks.
"""

from __future__ import annotations

from collections.abc import Mapping

from miles_like.protocols import SampleReward
from miles_like.types import Finish, Prompt, Sample

TOO_LONG = 64  # response tokens that cost a whole point


def short_and_right(prompt: Prompt, sample: Sample) -> Mapping[str, float] | None:
    """Protocol: SampleReward. A number, or a mapping whose "score" is trained on and whose other entries are logged, as
    rollout/reward/NAME/mean.

    None: the reward cannot be computed. It is asked for once more; then the sample is discarded, never counted as 0.
    """
    if not prompt.answer:
        return None
    right = float(sample.finish is Finish.STOP and sample.text.strip() == prompt.answer.strip())
    length = -sample.response_len / TOO_LONG
    return {"score": right + 0.1 * length, "right": right, "length": length}


_: SampleReward = short_and_right  # mypy holds it to its Protocol here

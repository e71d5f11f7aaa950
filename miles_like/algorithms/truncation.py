"""Samples near or at the token limit: overlong reward shaping and masking (DAPO, arXiv:2503.14476, 3.4).

Letters: G samples a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from miles_like.config.sections.algorithm import Overlong
from miles_like.types import Finish, Prompt, Sample, SampleGroup

PART = "overlong"  # key in Sample.reward_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongShaping:
    """Reduces the reward of a sample with n tokens after its prompt, an environment's included, by `factor` times (eq.
    13): 0 up to limit - buffer, from there linearly up to 1 at `limit`, and 1 above."""

    limit: int  # tokens
    buffer: int  # tokens
    factor: float

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.limit:
            raise ValueError(
                f"overlong_buffer = {self.buffer} with a limit of {self.limit} tokens: set it to 1 to {self.limit}"
            )

    def shape(self, group: SampleGroup) -> SampleGroup:
        """The group with reduced rewards; the difference is in `reward_parts["overlong"]`. Raises ValueError for a
        sample without a reward."""
        scored = zip(group.rows, group.rewards, strict=True)
        return replace(group, samples=tuple(s for rows, r in scored for s in self._shaped(group.prompt, rows, r)))

    def _shaped(self, prompt: Prompt, rows: Sequence[Sample], reward: float) -> list[Sample]:
        """Of an episode, by its longest row."""
        n = max(s.length for s in rows) - len(prompt.token_ids)
        over = (n - (self.limit - self.buffer)) / self.buffer
        penalty = -self.factor * min(max(over, 0.0), 1.0)
        return [replace(s, reward=reward + penalty, reward_parts={**s.reward_parts, PART: penalty}) for s in rows]


def mask_truncated(groups: Sequence[SampleGroup], *, steps: int = 1) -> list[SampleGroup]:
    """The groups with an empty loss mask in samples that were cut at the token limit: their rewards still count in the
    group's baseline, but they are not trained on. Raises ValueError if one of the `steps` mini-batches of the groups
    (`Packer.steps`) has no other sample."""
    each = max(len(groups) // steps, 1)
    for i in range(0, len(groups), each):
        samples = [s for g in groups[i : i + each] for s in g.samples]
        if samples and all(s.finish is Finish.LENGTH for s in samples):
            what = "the rollout" if steps == 1 else f"mini-batch {i // each + 1} of {steps}"
            raise ValueError(
                f"all {len(samples)} samples of {what} were cut at the token limit, and algorithm.mask_truncated "
                "excludes them: raise rollout.max_new_tokens, or set algorithm.mask_truncated = false"
            )
    return [replace(g, samples=tuple(_masked(s) for s in g.samples)) for g in groups]


def _masked(sample: Sample) -> Sample:
    return sample if sample.finish is not Finish.LENGTH else sample.without_loss()


def make_overlong(config: Overlong | None, limit: int) -> OverlongShaping | None:
    """limit: tokens after the prompt. None: off. The default buffer is a fifth of the limit, as the paper's 4096 of
    20480 tokens."""
    if config is None:
        return None
    buffer = config.overlong_buffer or max(limit // 5, 1)
    return OverlongShaping(limit=limit, buffer=buffer, factor=config.overlong_penalty)

"""Which prompts rest, by how many of their samples passed when they were measured last.

A prompt that all samples pass, or none, has equal rewards and teaches nothing (DAPO, arXiv:2503.14476, 3.2, leaves such
groups out once they are sampled). Here it is not even sampled for a while.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.data_config import CurriculumConfig


class Curriculum:
    """`rests`: how often a prompt is still to be passed over, by its id; those that come are not in it."""

    def __init__(self, config: CurriculumConfig | None) -> None:
        self._config = config
        self.rests: dict[str, int] = {}

    def observe(self, prompt_id: str, rewards: Sequence[float]) -> None:
        """The rewards of a prompt's samples, before anything is added for their length; without any, nothing is
        learnt."""
        c = self._config
        if c is None or not rewards:
            return
        rate = sum(r >= c.pass_at for r in rewards) / len(rewards)
        self.rests.pop(prompt_id, None)
        if not c.min_pass_rate <= rate <= c.max_pass_rate:
            self.rests[prompt_id] = c.rest_epochs

    def passes_over(self, prompt_id: str) -> bool:
        """Whether the prompt, whose turn it is, rests. Asked once a turn: it counts down."""
        left = self.rests.pop(prompt_id, 0)
        if left > 1:
            self.rests[prompt_id] = left - 1
        return left > 0

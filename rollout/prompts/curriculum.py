"""The curriculum: prompts rest while their last measured pass rate is out of bounds.

If all samples of a prompt pass, or none, their rewards are equal and give no gradient. DAPO (arXiv:2503.14476, 3.2)
discards such groups after sampling; a curriculum does not sample the prompt for some epochs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rollout.prompts.config import CurriculumConfig

STRATA = ("never", "hard", "medium", "easy", "always")


def stratum(pass_rate: float) -> str:
    """One of STRATA: 0, up to 1/4, below 3/4, below 1, and 1."""
    if pass_rate <= 0:
        return "never"
    if pass_rate >= 1:
        return "always"
    return "hard" if pass_rate <= 0.25 else "medium" if pass_rate < 0.75 else "easy"


class Curriculum:
    """rests: prompt id -> how often the prompt is still to be skipped; only resting prompts are in it."""

    def __init__(self, config: CurriculumConfig | None) -> None:
        self._config = config
        self.rests: dict[str, int] = {}
        self._rates: list[float] = []  # of the prompts observed since the last call of `metrics`

    def observe(self, prompt_id: str, rewards: Sequence[float]) -> None:
        """Record the rewards of a prompt's samples, without length penalties. Empty rewards change nothing."""
        c = self._config
        if c is None or not rewards:
            return
        rate = sum(r >= c.pass_at for r in rewards) / len(rewards)
        self._rates.append(rate)
        self.rests.pop(prompt_id, None)
        if not c.min_pass_rate <= rate <= c.max_pass_rate:
            self.rests[prompt_id] = c.rest_epochs

    def metrics(self, prompts: int) -> dict[str, float]:
        """`curriculum/...` of the prompts observed since the last call (docs/metrics.md); empty without any. prompts:
        of the run."""
        rates, self._rates = self._rates, []
        if not rates:
            return {}
        counts = Counter(map(stratum, rates))
        return {
            "curriculum/pass_rate/mean": sum(rates) / len(rates),
            **{f"curriculum/share/{name}": counts[name] / len(rates) for name in STRATA},
            "curriculum/resting_frac": len(self.rests) / prompts,
        }

    def skips(self, prompt_id: str) -> bool:
        """Whether to skip the prompt this time. Counts down, so call it once each time it is the prompt's turn."""
        left = self.rests.pop(prompt_id, 0)
        if left > 1:
            self.rests[prompt_id] = left - 1
        return left > 0

"""Whether one model is worse than another on the same problems: a paired bootstrap over the problems.

Each problem has a score of either model, the mean reward of its answers. Problems are drawn with replacement, always
both scores of one together: how hard a problem is then cancels, and what is left is the noise of the difference (Efron
and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 6).

Letters: P problems, R resamples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
MOST = 100.0  # standard errors, where all problems differ by the same and there is no noise to measure
_BLOCK = 1 << 22  # places that are drawn at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Of the mean scores over the problems that both have."""

    problems: int
    before: float
    after: float
    error: float  # standard error of `after - before`
    low: float  # 2.5 % of the resampled differences are below it
    high: float  # and 2.5 % above it

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def fallen(self) -> float:
        """Standard errors by which `after` is below `before`; negative: it is above. Within -100 .. 100."""
        if not self.error:
            return 0.0 if not self.change else -MOST * float(np.sign(self.change))
        return float(np.clip(-self.change / self.error, -MOST, MOST))


def difference(
    before: Mapping[str, float], after: Mapping[str, float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Difference | None:
    """before, after: id of a problem -> its score. None: fewer than two problems have both. The result depends on the
    scores and the seed only, not on their order."""
    common = sorted(before.keys() & after.keys())
    if len(common) < 2:
        return None
    one, other = (np.array([scores[name] for name in common], dtype=np.float64) for scores in (before, after))
    means = _resampled(other - one, np.random.default_rng(seed), resamples)
    low, high = np.quantile(means, (0.025, 0.975))
    return Difference(
        problems=len(common),
        before=float(one.mean()),
        after=float(other.mean()),
        error=0.0 if np.ptp(other - one) == 0 else float(means.std(ddof=1)),
        low=float(low),
        high=float(high),
    )


def _resampled(values: NDArray[np.float64], draw: np.random.Generator, resamples: int) -> NDArray[np.float64]:
    """[P] -> [R]: the mean of P values drawn with replacement."""
    n = len(values)
    rows = max(1, _BLOCK // n)
    sizes = [min(rows, resamples - done) for done in range(0, resamples, rows)]
    return np.concatenate([values[draw.integers(0, n, size=(size, n))].mean(axis=1) for size in sizes])

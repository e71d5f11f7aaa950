"""Warnings about a run that learns nothing or is about to, each a function of the run's metric rows alone; those about
its entropy and its groups are alerts (miles_like.alerts).

A row is what `metrics.jsonl` holds of a step. Each check gets the rows so far, one per step in ascending order, and
returns the sentence of its warning, or None; rows without its metric are passed over.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, islice

PAGE = "docs/troubleshooting.md"
TRUNCATED = 0.3  # share of samples
FLAT_STEPS = 50
FLAT_RISE = 0.05  # of the rewards' standard deviation
OFTEN = 4  # times that a prompt is trained
MEMORY_STEPS = 20
LEARNT = 0.3  # rise of the mean reward, in standard deviations of the first step's rewards
LESS = 5.0  # times the rise of held-out figures
SOLVED = 0.95  # accuracy and reward from which a flat reward is no fault
_FEW, _SEVERAL = 3, 5  # steps that are averaged, against the noise of one

Rows = Sequence[Mapping[str, float]]


def truncated(rows: Rows) -> str | None:
    """On average over the last 5 steps at least 30 % of the samples ended at the token limit."""
    last = list(islice(_values(reversed(rows), "rollout/truncated_frac"), _SEVERAL))
    if len(last) < _SEVERAL or (share := statistics.fmean(last)) < TRUNCATED:
        return None
    return f"{share:.0%} of the samples of the last {_SEVERAL} steps are truncated at rollout.max_new_tokens"


def reward_flat(rows: Rows) -> str | None:
    """Over the last 50 steps the rise of the mean reward, by a straight line fitted to it, plus two standard errors is
    at most 5 % of the standard deviation of the rewards. None where accuracy or reward is at least 0.95."""
    last = list(islice((r for r in reversed(rows) if _known(r.get("rollout/reward/mean"))), FLAT_STEPS))[::-1]
    if len(last) < FLAT_STEPS:
        return None
    rewards = [row["rollout/reward/mean"] for row in last]
    now = statistics.fmean(rewards[-_SEVERAL:])
    accuracy = [row["rollout/accuracy"] for row in last[-_SEVERAL:] if _known(row.get("rollout/accuracy"))]
    if max(now, statistics.fmean(accuracy) if accuracy else -math.inf) >= SOLVED:
        return None
    rise, error = _rise(rewards)
    spread = [row["rollout/reward/std"] for row in last if _known(row.get("rollout/reward/std"))]
    if rise + 2 * error > FLAT_RISE * (statistics.fmean(spread) if spread else 0.0) + 1e-9:
        return None
    before = statistics.fmean(rewards[:_SEVERAL])
    return f"the mean reward has not risen for {FLAT_STEPS} steps: {before:.3g}, now {now:.3g}"


def memorized(rows: Rows) -> str | None:
    """Since the first evaluation the mean reward has risen by at least 0.3 standard deviations of the first rewards,
    and by more than five times as much as every held-out figure. Needs 20 steps, and 3 evaluations, one of them after
    the last."""
    rows = list(dropwhile(lambda row: not _held_out(row), rows))  # earlier steps may have raised held-out figures too
    evaluated = [found for row in rows if (found := _held_out(row))]
    rewards = list(_values(rows, "rollout/reward/mean"))
    if len(evaluated) < _FEW or not _held_out(rows[-1]) or len(rewards) < MEMORY_STEPS:
        return None
    first, last = evaluated[0], evaluated[-1]
    rise = statistics.fmean(rewards[-_SEVERAL:]) - statistics.fmean(rewards[:_SEVERAL])
    gain = max((last[key] - value for key, value in first.items() if key in last), default=math.inf)
    if rise < LEARNT * next(_values(rows, "rollout/reward/std"), math.inf) or rise <= LESS * gain:
        return None
    return (
        f"the mean reward has risen by {rise:.3g} since the first evaluation, held-out figures by {gain:.3g} at most: "
        "the training prompts may be memorized"
    )


def _held_out(row: Mapping[str, float]) -> dict[str, float]:
    """The mean rewards of a row's evaluations."""
    return {k: v for k, v in row.items() if k.startswith("eval/") and "/avg@" in k and _known(v)}


CHECKS: Mapping[str, Callable[[Rows], str | None]] = {  # by the anchor of its section in PAGE
    "truncated-answers": truncated,
    "flat-reward": reward_flat,
    "memorized-prompts": memorized,
}


def repeated(prompts: int, *, steps: int, groups: int) -> list[str]:
    """A sentence where each prompt is trained more than four times on average."""
    times = steps * groups / prompts
    text = f"{prompts:,} prompts are each trained {times:.0f} times in {steps} steps of {groups}"
    return [f"{text} (see {PAGE}#memorized-prompts)"] if times > OFTEN else []


def warnings(rows: Rows) -> dict[str, str]:
    """Anchor in PAGE -> sentence, of the checks that fail after the last of `rows`."""
    return {anchor: text for anchor, check in CHECKS.items() if (text := check(rows)) is not None}


@dataclass(slots=True)
class Warner:
    """Reports each warning when it begins, and again only after 50 steps without it."""

    _last: dict[str, float] = field(default_factory=dict)  # anchor -> last step at which it held

    def begun(self, rows: Rows) -> list[str]:
        """The warnings that begin with the last of `rows`, each with its link. Call it after every step."""
        step, found = rows[-1]["step"], warnings(rows)
        begun = [a for a in found if step - self._last.get(a, -math.inf) > FLAT_STEPS]
        self._last |= dict.fromkeys(found, step)
        return [f"{found[anchor]} (see {PAGE}#{anchor})" for anchor in begun]


def _rise(values: Sequence[float]) -> tuple[float, float]:
    """(rise over the values by least squares, its standard error)."""
    n = len(values)
    mean, spread = statistics.fmean(values), (n**2 - 1) / 12  # of the places 0 .. n - 1
    slope = statistics.fmean((i - (n - 1) / 2) * (v - mean) for i, v in enumerate(values)) / spread
    rest = sum((v - mean - slope * (i - (n - 1) / 2)) ** 2 for i, v in enumerate(values)) / (n - 2)
    return slope * (n - 1), (n - 1) * math.sqrt(rest / (n * spread))


def _values(rows: Iterable[Mapping[str, float]], key: str) -> Iterator[float]:
    return (row[key] for row in rows if _known(row.get(key)))


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)

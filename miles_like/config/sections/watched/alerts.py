"""Settings of alerts on a run's metrics (docs/alerts.md). Torch-free.

Every alert has a reading for each step, computed from the rows of metrics.jsonl. It fires when the reading reaches
`threshold`, and is over, so that it may fire again, when the reading has fallen below `clear` times that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from pydantic import Field

from miles_like.section import Section

Action: TypeAlias = Literal["off", "log", "notify", "pause", "stop", "rollback"]
STRENGTH: tuple[Action, ...] = ("off", "log", "notify", "pause", "stop", "rollback")


class AlertRule(Section):
    threshold: float = Field(gt=0)
    clear: float = Field(0.8, gt=0, le=1)
    window: int = Field(3, ge=1)
    action: Action = "log"


class KlSpike(AlertRule):
    """`train/kl_ref`, `train/kl_old` or `mismatch/kl` over its own largest value of the steps before."""

    threshold: float = Field(5.0, gt=0)  # times the largest value
    clear: float = Field(0.5, gt=0, le=1)  # share of `threshold` below which it is over
    window: int = Field(8, ge=3)  # steps before this one of which the largest value is; at least 3 must be there
    floor: float = Field(0.01, gt=0)  # nats/token: a smaller largest value counts as this
    action: Action = "log"  # what is done when it fires (docs/alerts.md)


class EntropyCollapse(AlertRule):
    """By how much `train/entropy` of the last steps is below that of the first ones, as a share."""

    threshold: float = Field(0.9, gt=0, le=1)  # share of the first steps' entropy that is gone
    clear: float = Field(0.9, gt=0, le=1)  # share of `threshold` below which it is over
    window: int = Field(3, ge=1)  # steps of either mean
    action: Action = "log"  # what is done when it fires


class RewardHacking(AlertRule):
    """`eval/{set}/regression` where the reward in training has risen since the set's best evaluation."""

    threshold: float = Field(2.0, gt=0)  # standard errors below the best evaluation
    clear: float = Field(0.5, gt=0, le=1)  # share of `threshold` below which it is over
    window: int = Field(3, ge=1)  # steps of either mean of the reward
    rise: float = Field(0.1, ge=0)  # of the reward, in standard deviations of a step's rewards
    action: Action = "log"  # what is done when it fires


class RewardLatency(AlertRule):
    """Mean of `perf/reward/p99_s`."""

    threshold: float = Field(60.0, gt=0)  # s
    clear: float = Field(0.5, gt=0, le=1)  # share of `threshold` below which it is over
    window: int = Field(3, ge=1)  # steps of the mean
    action: Action = "log"  # what is done when it fires


class PolicyLag(AlertRule):
    """Mean of `async/staleness/mean`."""

    threshold: float = Field(8.0, gt=0)  # weight versions
    clear: float = Field(0.8, gt=0, le=1)  # share of `threshold` below which it is over
    window: int = Field(3, ge=1)  # steps of the mean
    action: Action = "log"  # what is done when it fires


class DeadGroups(AlertRule):
    """Mean share of the sampled groups that give no gradient: filtered ones, and those whose rewards are all equal."""

    threshold: float = Field(0.95, gt=0, le=1)  # share of groups
    clear: float = Field(0.9, gt=0, le=1)  # share of `threshold` below which it is over
    window: int = Field(3, ge=1)  # steps of the mean
    action: Action = "log"  # what is done when it fires


class LengthDrift(AlertRule):
    """`rollout/len/mean` of the last steps over the median of those before, or the inverse, whichever is larger."""

    threshold: float = Field(2.5, gt=1)  # times longer or shorter
    clear: float = Field(0.8, gt=0, le=1)  # share of `threshold` below which it is over
    window: int = Field(3, ge=1)  # last steps, of which the mean is
    before: int = Field(20, ge=3)  # steps before them, of which the median is; at least 3 must be there
    action: Action = "log"  # what is done when it fires


class Stall(AlertRule):
    """Seconds of a phase of a step over their median; also of a phase that has not ended."""

    threshold: float = Field(10.0, gt=1)  # times the median
    clear: float = Field(0.5, gt=0, le=1)  # share of `threshold` below which it is over
    window: int = Field(8, ge=3)  # steps before this one of which the median is; at least 3 must be there
    floor_s: float = Field(10.0, gt=0)  # a smaller median counts as this
    action: Action = "log"  # what is done when it fires


class EvalRegression(AlertRule):
    """The largest `eval/{set}/regression`: the gate of evaluations."""

    threshold: float = Field(3.0, gt=0)  # k: standard errors below the set's best evaluation
    clear: float = Field(0.5, gt=0, le=1)  # share of `threshold` below which it is over
    window: int = Field(1, ge=1)  # evaluations of which each must be so far below
    action: Action = "log"  # what is done when it fires


class AlertsConfig(Section):
    kl_spike: KlSpike = KlSpike()
    entropy_collapse: EntropyCollapse = EntropyCollapse()
    reward_hacking: RewardHacking = RewardHacking()
    reward_latency: RewardLatency = RewardLatency()
    policy_lag: PolicyLag = PolicyLag()
    dead_groups: DeadGroups = DeadGroups()
    length_drift: LengthDrift = LengthDrift()
    stall: Stall = Stall()
    eval_regression: EvalRegression = EvalRegression()
    # name of an environment variable of the driver with the URL to which alerts are posted, but for those with action
    # "log"; None: they are not posted
    webhook_variable: str | None = None
    webhook_timeout_s: float = Field(5.0, gt=0)  # of one request
    webhook_retries: int = Field(3, ge=0)  # further requests after one that failed
    # how often training goes on after it went back to the best checkpoint; one more time ends the run there
    rollbacks: int = Field(1, ge=0)

    def rules(self) -> Iterator[tuple[str, AlertRule]]:
        """Name -> rule, of all alerts."""
        for name in type(self).model_fields:
            if isinstance(rule := getattr(self, name), AlertRule):
                yield name, rule

    def check(self, *, keep_best: str | None, evaluates: bool) -> None:
        """Raises ValueError for an action that has nothing to work with. evaluates: the run has an eval set and
        eval.every is not 0."""
        for name, rule in self.rules():
            if rule.action == "rollback" and keep_best is None:
                raise ValueError(
                    f"alerts.{name}.action = 'rollback' goes back to the best kept checkpoint, but "
                    "checkpoint.keep_best is not set: set it, for example to eval/heldout/avg@1"
                )
            needs = isinstance(rule, EvalRegression | RewardHacking)
            if needs and rule.action not in ("off", "log") and not evaluates:
                raise ValueError(
                    f"alerts.{name}.action = {rule.action!r} has no effect without evaluations: set data.eval or "
                    "eval.sets, and eval.every above 0"
                )

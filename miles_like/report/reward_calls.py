"""What the calls of rewards take, which are tried again and which fail; replayed episodes, and requests of agents.

The figures depend on timing, so their keys begin with `perf/` (docs/metrics.md#operations).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

CAUSES = ("timeout", "away", "unscored")  # why a call of a reward gave no score
RECORDED = ("requests", "rows", "forks", "false_forks", "rebuilt")  # rollout.recorder.session
_MOST = 100_000  # latencies that are kept between two rows


@dataclass(slots=True, kw_only=True)
class RewardTally:
    """Counts the calls of rewards in one process: a `RewardLog`, and an `EpisodeLog` (miles_like.protocols)."""

    waiting: int = 0  # samples whose score is being computed
    latencies: list[float] = field(default_factory=list)  # s, of each sample that was scored or not, since `take`
    retried: Counter[str] = field(default_factory=Counter)  # cause -> samples whose reward was called again
    failed: Counter[str] = field(default_factory=Counter)  # cause -> samples that have no score
    tokens: int = 0  # of judges, as their servers report them
    replayed: int = 0  # episodes that were in flight when the run was saved, and went on
    begun_anew: int = 0  # those of which an answer was another one then
    recorded: Counter[str] = field(default_factory=Counter)  # of agents: requests, rows, and why rows began

    def begin(self, samples: int) -> None:
        self.waiting += samples

    def end(self, samples: int, seconds: float) -> None:
        self.waiting -= samples
        self.latencies += [seconds] * min(samples, _MOST - len(self.latencies))

    def retry(self, cause: str, samples: int) -> None:
        self.retried[cause] += samples

    def fail(self, cause: str, samples: int) -> None:
        self.failed[cause] += samples

    def spend(self, tokens: int) -> None:
        self.tokens += tokens

    def replay(self, *, again: bool) -> None:
        self.replayed += not again
        self.begun_anew += again

    def record(self, counts: Mapping[str, int]) -> None:
        self.recorded.update(counts)

    def take(self) -> RewardTally:
        """What was counted since the last call; `waiting` stays."""
        taken = replace(self)
        self.latencies, self.retried, self.failed, self.recorded = [], Counter(), Counter(), Counter()
        self.tokens = self.replayed = self.begun_anew = 0
        return taken

    def add(self, other: RewardTally) -> None:
        """Adds what another process has counted, but not what waits there."""
        self.latencies += other.latencies[: _MOST - len(self.latencies)]
        self.retried += other.retried
        self.failed += other.failed
        self.tokens += other.tokens
        self.replayed += other.replayed
        self.begun_anew += other.begun_anew
        self.recorded += other.recorded

    def metrics(self) -> dict[str, float]:
        """`perf/reward/...`, `perf/retries/...`, `perf/failures/...` since the last call, and `perf/queue/scoring`."""
        taken = self.take()
        return {
            **_percentiles(taken.latencies),
            "perf/queue/scoring": float(taken.waiting),
            **({"perf/reward/judge_tokens": float(taken.tokens)} if taken.tokens else {}),
            **_replays(taken),
            **({f"perf/agent/{what}": float(taken.recorded[what]) for what in RECORDED} if taken.recorded else {}),
            **{f"perf/retries/reward_{cause}": float(taken.retried[cause]) for cause in CAUSES},
            **{f"perf/failures/reward_{cause}": float(taken.failed[cause]) for cause in CAUSES},
        }


def _replays(taken: RewardTally) -> dict[str, float]:
    found = {"perf/episodes/replayed": taken.replayed, "perf/episodes/begun_anew": taken.begun_anew}
    return {key: float(n) for key, n in found.items()} if any(found.values()) else {}


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """By the nearest rank, so that each is one of the measured times."""
    if not seconds:
        return {}
    p50, p99 = np.quantile(seconds, (0.5, 0.99), method="inverted_cdf")
    return {"perf/reward/p50_s": float(p50), "perf/reward/p99_s": float(p99)}

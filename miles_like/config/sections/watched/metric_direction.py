"""Whether more or less of a metric is better. Torch-free."""

from __future__ import annotations

# Prefixes of metrics with a better direction, for "best" in tables; other metrics have none.
HIGHER_IS_BETTER = (
    "rollout/reward/mean",
    "rollout/accuracy",
    "eval/",
    "preference/accuracy",
    "preference/margin",
    "mismatch/ess",
    "routing/",
    "perf/tokens_per_s",
    "perf/samples_per_s",
    "perf/mfu",
)
LOWER_IS_BETTER = (
    *("mismatch/", "perf/", "sync/seconds", "train/skipped"),
    *("rollout/truncated_frac", "rollout/empty_frac", "rollout/zero_std_group_frac"),
)
NEITHER = ("perf/queue/",)
SIGNED = ("mismatch/k1", "mismatch/chi2")  # best at 0, and negative by chance
SIZES = ("routing/bytes",)  # smaller is better, unlike the other metrics of their section


def better(key: str) -> int:
    """+1 if larger is better, -1 if smaller is, 0 if neither."""
    if key.startswith((*SIGNED, *NEITHER)):
        return 0
    if key.startswith(SIZES) or (key.startswith("eval/") and key.endswith(("/loss", "/unscored_frac", "/regression"))):
        return -1
    if key.startswith(HIGHER_IS_BETTER):
        return 1
    return -1 if key.startswith(LOWER_IS_BETTER) else 0

"""Whether more or less of a metric is better. Torch-free."""

from __future__ import annotations

# A metric's better direction, for "best" in tables; what is not here has none.
HIGHER_IS_BETTER = (
    "rollout/reward/mean",
    "eval/",
    "preference/accuracy",
    "preference/margin",
    "mismatch/ess",
    "routing/",
    "perf/tokens_per_s",
    "perf/mfu",
)
LOWER_IS_BETTER = (
    *("mismatch/", "perf/", "sync/seconds", "train/skipped"),
    *("rollout/truncated_frac", "rollout/empty_frac", "rollout/zero_std_group_frac"),
)
SIGNED = ("mismatch/k1", "mismatch/chi2")  # best at 0, and below it by chance
SIZES = ("routing/bytes",)  # the smaller the better, though their section's figures are shares


def better(key: str) -> int:
    """+1 when larger is better, -1 when smaller is, 0 when neither."""
    if key.startswith(SIGNED):
        return 0
    if key.startswith(SIZES) or (key.startswith("eval/") and key.endswith(("/loss", "/unscored_frac"))):
        return -1
    if key.startswith(HIGHER_IS_BETTER):
        return 1
    return -1 if key.startswith(LOWER_IS_BETTER) else 0

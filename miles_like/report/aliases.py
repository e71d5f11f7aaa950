"""Metrics under the names that other frameworks give them, for dashboards made for those.

An alias has the value of the metric as docs/metrics.md defines it; definitions elsewhere differ in what a mean is over.
Names as of verl 0.7 (verl/trainer/ppo/metric_utils.py, verl/workers/actor) and slime's main branch of 2026-06
(slime/backends/megatron_utils, slime/ray/rollout.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from miles_like.config.sections.watched.report import OtherNames
from miles_like.protocols import MetricSink

ALIASES: Mapping[OtherNames, Mapping[str, str]] = {
    "verl": {
        "step": "training/global_step",
        "rollout/reward/mean": "critic/score/mean",
        "rollout/len/mean": "response_length/mean",
        "rollout/truncated_frac": "response_length/clip_ratio",
        "rollout/empty_frac": "response/aborted_ratio",
        "rollout/turns/mean": "num_turns/mean",
        "train/pg_loss": "actor/pg_loss",
        "train/entropy": "actor/entropy",
        "train/kl_old": "actor/ppo_kl",
        "train/kl_ref": "actor/kl_loss",
        "train/clip_frac/dual": "actor/pg_clipfrac_lower",
        "train/grad_norm": "actor/grad_norm",
        "train/lr": "actor/lr",
        "critic/loss": "critic/vf_loss",
        "critic/explained_variance": "critic/vf_explained_var",
        "mismatch/prob_abs_diff": "training/rollout_probs_diff_mean",
        "perf/step_s": "perf/time_per_step",
        "perf/mfu": "perf/mfu/actor",
        "perf/rollout_s": "timing_s/gen",
        "perf/train_s": "timing_s/update_actor",
        "perf/publish_s": "timing_s/update_weights",
    },
    "slime": {
        "rollout/reward/mean": "rollout/raw_reward",
        "rollout/len/mean": "rollout/response_len/mean",
        "rollout/truncated_frac": "rollout/truncated_ratio",
        "train/entropy": "train/entropy_loss",
        "train/kl_old": "train/ppo_kl",
        "train/kl_ref": "train/kl_loss",
        "train/lr": "train/lr-pg_0",
        "mismatch/logprob_abs_diff": "train/train_rollout_logprob_abs_diff",
        "perf/step_s": "perf/step_time",
        "perf/rollout_s": "perf/rollout_time",
        "perf/train_s": "perf/train_time",
        "perf/publish_s": "perf/update_weights_time",
    },
}
_MEAN = re.compile(r"eval/(?P<set>[^/]+)/avg@(?P<k>\d+)")
_EVALUATED: Mapping[OtherNames, str] = {"verl": r"val-core/\g<set>/reward/mean@\g<k>", "slime": r"eval/\g<set>"}


def aliased(step: int, metrics: Mapping[str, float], names: Collection[OtherNames]) -> dict[str, float]:
    """Alias -> value, of the metrics that one of the frameworks has a name for."""
    row = {"step": float(step), **metrics}
    out = dict[str, float]()
    for name in names:
        out |= {alias: row[key] for key, alias in ALIASES[name].items() if key in row}
        out |= {_MEAN.sub(_EVALUATED[name], key): value for key, value in row.items() if _MEAN.fullmatch(key)}
    return out


class Aliased:
    """Writes rows with their aliases to another sink."""

    def __init__(self, sink: MetricSink, names: Collection[OtherNames]) -> None:
        self._sink, self._names = sink, names

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._sink.write(step, {**metrics, **aliased(step, metrics, self._names)})

    def close(self) -> None:
        self._sink.close()

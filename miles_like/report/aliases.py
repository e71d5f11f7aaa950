"""Metrics under the names that other frameworks give them, for dashboards made for those.

Names and definitions as of verl 0.9.0 (verl/trainer/ppo/metric_utils.py, core_algos.py, rollout_corr_helper.py,
v1/trainer_base.py, verl/utils/debug/metrics.py, verl/workers/utils/losses.py) and slime 0.3.1
(slime/backends/megatron_utils/loss.py, model.py, data.py, slime/ray/rollout.py, slime/utils/train_metric_utils.py).
slime's train/loss, train/pg_loss, train/grad_norm and train/mtp_loss are names of this project too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from miles_like.config.sections.watched.report import OtherNames
from miles_like.protocols import MetricSink

# alias -> the metric, or the metrics whose sum it is
ALIASES: Mapping[OtherNames, Mapping[str, str | tuple[str, ...]]] = {
    "verl": {
        "training/global_step": "step",
        "critic/score/mean": "rollout/reward/mean",
        "critic/rewards/mean": "rollout/reward/mean",
        "response_length/mean": "rollout/len/mean",
        "response_length/clip_ratio": "rollout/truncated_frac",
        "response/aborted_ratio": "rollout/empty_frac",
        "num_turns/mean": "rollout/turns/mean",
        "training/num_turns/mean": "rollout/turns/mean",  # of the trainer that 0.9 uses
        "training/off_policy/trajectory_staleness_worst/mean": "async/staleness/mean",
        "training/off_policy/trajectory_staleness_worst/max": "async/staleness/max",
        "actor/pg_loss": "train/pg_loss",
        "actor/entropy": "train/entropy",
        "actor/ppo_kl": "train/kl_old",
        "actor/kl_loss": "train/kl_ref",
        "actor/pg_clipfrac": ("train/clip_frac/low", "train/clip_frac/high"),
        "actor/pg_clipfrac_lower": "train/clip_frac/dual",
        "actor/grad_norm": "train/grad_norm",
        "actor/lr": "train/lr",
        "critic/vf_loss": "critic/loss",
        "critic/vf_clipfrac": "critic/clip_frac",
        "critic/vpred_mean": "critic/value/mean",
        "critic/returns/mean": "critic/return/mean",
        "critic/vf_explained_var": "critic/explained_variance",
        "training/rollout_probs_diff_mean": "mismatch/prob_abs_diff",
        "rollout_corr/kl": "mismatch/k1",
        "rollout_corr/k3_kl": "mismatch/kl",
        "rollout_corr/chi2_token": "mismatch/chi2",
        "rollout_corr/chi2_seq": "mismatch/chi2_sequence",
        "perf/time_per_step": "perf/step_s",
        "timing_s/step": "perf/step_s",
        "timing_s/gen": "perf/rollout_s",
        "timing_s/update_actor": "perf/train_s",
        "timing_s/update_weights": "perf/publish_s",
        "perf/mfu/actor": "perf/mfu",
    },
    "slime": {
        "rollout/raw_reward": "rollout/reward/mean",
        "rollout/response_len/mean": "rollout/len/mean",
        "rollout/truncated_ratio": "rollout/truncated_frac",
        "multi_turn/multi_turn_metric/round_number_mean": "rollout/turns/mean",
        "train/entropy_loss": "train/entropy",
        "train/ppo_kl": "train/kl_old",
        "train/kl_loss": "train/kl_ref",
        "train/pg_clipfrac": ("train/clip_frac/low", "train/clip_frac/high"),
        "train/lr-pg_0": "train/lr",
        "train/critic-grad_norm": "critic/grad_norm",
        "train/critic-lr-pg_0": "critic/lr",
        "train/train_rollout_logprob_abs_diff": "mismatch/logprob_abs_diff",
        "perf/step_time": "perf/step_s",
        "perf/rollout_time": "perf/rollout_s",
        "perf/train_time": ("perf/experience_s", "perf/train_s"),
        "perf/update_weights_time": "perf/publish_s",
    },
}
# of evaluations: a pattern -> the name
_EVALUATED: Mapping[OtherNames, Mapping[re.Pattern[str], str]] = {
    "verl": {re.compile(r"eval/(?P<set>[^/]+)/avg@(?P<k>\d+)"): r"val-core/\g<set>/reward/mean@\g<k>"},
    "slime": {
        re.compile(r"eval/(?P<set>[^/]+)/avg@\d+"): r"eval/\g<set>",
        re.compile(r"eval/(?P<set>[^/]+)/pass@(?P<k>\d+)"): r"eval/\g<set>-pass@\g<k>",
    },
}


def aliased(step: int, metrics: Mapping[str, float], names: Collection[OtherNames]) -> dict[str, float]:
    """Alias -> value, of the metrics that one of the frameworks has a name for."""
    row = {"step": float(step), **metrics}
    out = dict[str, float]()
    for name in names:
        for alias, of in ALIASES[name].items():
            keys = (of,) if isinstance(of, str) else of
            if all(key in row for key in keys):
                out[alias] = sum(row[key] for key in keys)
        for pattern, alias in _EVALUATED[name].items():
            out |= {pattern.sub(alias, key): value for key, value in row.items() if pattern.fullmatch(key)}
    return out


class Aliased:
    """Writes rows with their aliases to another sink."""

    def __init__(self, sink: MetricSink, names: Collection[OtherNames]) -> None:
        self._sink, self._names = sink, names

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._sink.write(step, {**metrics, **aliased(step, metrics, self._names)})

    def close(self) -> None:
        self._sink.close()

"""What the page draws: each plot with its metrics, and the sentence that it shows while a run has none of them.

docs/metrics.md defines every metric; those that begin with `page/` are of curves.RISES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["lines", "bars", "evals", "grid", "histogram", "ratios", "gantt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """metrics: metric, or `prefix*`, or `*suffix`, or `prefix*suffix` -> its name in the plot ("": the metric's)."""

    id: str
    title: str
    unit: str
    missing: str  # how to get the data
    metrics: Mapping[str, str]
    kind: Kind = "lines"
    log: bool = False
    share: bool = False  # values are shares of 1


_ROLLOUT = "a run with a rollout writes it in every step; supervised training has none"
_ASYNC = "0 while buffer.max_staleness = 0: raise it to sample ahead of the trainer"

OVERVIEW = (
    Panel(
        id="reward",
        title="Reward",
        unit="mean over the step's samples",
        missing=_ROLLOUT,
        metrics={"rollout/reward/mean": "reward"},
    ),
    Panel(
        id="eval",
        title="Evaluation",
        unit="held-out figures; bars: one standard error over the set's problems",
        missing="set data.eval or eval.sets, and eval.every",
        metrics={"eval/*": ""},
        kind="evals",
    ),
    Panel(
        id="regression",
        title="Fall of evaluations",
        unit="standard errors below the set's best one",
        missing="from the second evaluation of a set on: set data.eval or eval.sets, and eval.every",
        metrics={"eval/*/regression": ""},
    ),
    Panel(
        id="generated",
        title="Generated tokens",
        unit="response tokens sampled for the step",
        missing=_ROLLOUT,
        metrics={"rollout/tokens": "tokens"},
    ),
    Panel(
        id="learner_tokens",
        title="Learner tokens",
        unit="response tokens trained by the step",
        missing=_ROLLOUT,
        metrics={"page/train_tokens": "tokens"},
    ),
    Panel(
        id="backlog",
        title="Backlog delta",
        unit="samples in flight, rise since the row before",
        missing=_ROLLOUT,
        metrics={"page/backlog": "samples"},
        kind="bars",
    ),
    Panel(
        id="lag",
        title="Version lag",
        unit="versions; trained less sampled",
        missing=_ROLLOUT,
        metrics={"async/staleness/mean": "mean", "async/staleness/max": "largest"},
    ),
    Panel(
        id="kl",
        title="KL divergence",
        unit="nats/token",
        missing="train/kl_ref needs algorithm.kl_coefficient > 0; the others a rollout",
        metrics={"train/kl_ref": "to the reference", "train/kl_old": "old to trained", "mismatch/kl": "mismatch"},
    ),
    Panel(
        id="rewards",
        title="Reward distribution",
        unit="samples of a step with kept samples, by reward",
        missing="no samples are kept in rollouts/: a run with a rollout writes them",
        metrics={},
        kind="histogram",
    ),
    Panel(
        id="publish",
        title="Publish latency",
        unit="seconds",
        missing=_ROLLOUT,
        metrics={"perf/publish_s": "publication", "perf/pause_s": "servers paused"},
    ),
)
LEARNING = (
    Panel(
        id="parts",
        title="Parts of the reward",
        unit="mean over the step's samples",
        missing="set reward.parts, or return parts from the reward",
        metrics={"rollout/reward/*/mean": ""},
    ),
    Panel(
        id="loss",
        title="Loss",
        unit="what is minimised",
        missing="no row has it",
        metrics={"train/loss": "loss", "train/nll": "negative log-likelihood"},
    ),
    Panel(
        id="entropy",
        title="Entropy",
        unit="nats/token",
        missing="no row has it: preferences and reward models have none",
        metrics={"train/entropy": "entropy"},
    ),
    Panel(
        id="gradient",
        title="Gradient norm",
        unit="before clipping",
        missing="no row has it",
        metrics={"train/grad_norm": "policy", "critic/grad_norm": "critic"},
        log=True,
    ),
    Panel(
        id="lengths",
        title="Response length",
        unit="tokens",
        missing=_ROLLOUT,
        metrics={"rollout/len/mean": "mean"},
    ),
    Panel(
        id="shares",
        title="Samples and groups without use",
        unit="share",
        missing=_ROLLOUT,
        share=True,
        metrics={
            "rollout/truncated_frac": "truncated",
            "rollout/empty_frac": "empty",
            "rollout/zero_std_group_frac": "groups of equal rewards",
            "rollout/filtered_frac": "groups filtered",
        },
    ),
    Panel(
        id="clipped",
        title="Clipped tokens",
        unit="share of tokens",
        missing="set algorithm.loss to a loss that clips",
        share=True,
        metrics={"train/clip_frac/*": ""},
    ),
    Panel(
        id="preferences",
        title="Preferences",
        unit="share of pairs; reward",
        missing="train on pairs: set algorithm.name = 'dpo' or another objective over pairs",
        metrics={"preference/accuracy": "accuracy", "preference/margin": "margin"},
    ),
    Panel(
        id="critic",
        title="Critic",
        unit="explained variance",
        missing="set algorithm.advantage = 'ppo'",
        metrics={"critic/explained_variance": "explained variance"},
    ),
)
ALIGNMENT = (
    Panel(
        id="mismatch",
        title="Trainer-rollout mismatch",
        unit="nats/token; exact zeros are not drawn",
        missing=_ROLLOUT,
        metrics={
            "mismatch/logprob_abs_diff_max": "largest |Δ|",
            "mismatch/logprob_abs_diff": "mean |Δ|",
            "mismatch/kl": "KL (k3)",
            "mismatch/known_answer": "known answer",
        },
        log=True,
    ),
    Panel(
        id="ratios",
        title="Ratio of trainer to rollout",
        unit="tokens of the kept samples, by rho; of the last step that has them",
        missing="set train.token_logprobs_every",
        metrics={},
        kind="ratios",
    ),
    Panel(
        id="tail",
        title="Tail of the ratio",
        unit="rho above 2 or below 1/2: share of tokens; chi-square",
        missing=_ROLLOUT,
        metrics={"mismatch/extreme_frac": "extreme tokens", "mismatch/chi2": "chi-square"},
    ),
    Panel(
        id="ess",
        title="Effective sample size",
        unit="share",
        missing=_ROLLOUT,
        metrics={"mismatch/ess": "over tokens", "mismatch/ess_sequence": "over samples"},
        share=True,
    ),
    Panel(
        id="layers",
        title="Expert agreement by layer",
        unit="share of recorded experts; each cell is the lowest of its steps",
        missing="a mixture of experts whose rollout returns routes has it: replay.mode other than 'off'",
        metrics={"routing/expert_agreement/*": ""},
        kind="grid",
    ),
    Panel(
        id="routing",
        title="Expert routes",
        unit="share",
        missing="a mixture of experts whose rollout returns routes has it: replay.mode other than 'off'",
        metrics={
            "routing/agreement": "same set of experts",
            "routing/expert_agreement": "same experts",
            "routing/replay_coverage": "replayed",
        },
        share=True,
    ),
    Panel(
        id="staleness",
        title="Staleness",
        unit="versions, of groups",
        missing=_ASYNC,
        metrics={"async/staleness/mean": "mean", "async/staleness/max": "largest"},
    ),
    Panel(
        id="weights",
        title="Importance weights",
        unit="mean and largest",
        missing=_ROLLOUT,
        metrics={"train/is_weight/mean": "mean", "train/is_weight/max": "largest"},
    ),
)
LEDGER = (
    Panel(
        id="fates",
        title="Sample outcomes",
        unit="samples since the row before",
        missing=_ROLLOUT,
        metrics={"page/trained": "trained", "page/discarded": "discarded"},
        kind="bars",
    ),
    Panel(
        id="in_flight",
        title="Backlog",
        unit="samples in flight at the end of a step",
        missing=_ROLLOUT,
        metrics={"ledger/in_flight": "in flight"},
    ),
    Panel(
        id="queues",
        title="Queues",
        unit="groups; samples for scoring",
        missing="rows of this version of the run have no perf/queue/ figures",
        metrics={"perf/queue/*": ""},
    ),
    Panel(
        id="failures",
        title="Retries and failures",
        unit="samples, by their cause",
        missing="rows of this run have no perf/retries/ and perf/failures/ figures",
        metrics={"perf/retries/*": "", "perf/failures/*": ""},
    ),
    Panel(
        id="dropped",
        title="Discarded groups",
        unit="groups since the run began",
        missing=_ROLLOUT,
        metrics={"async/dropped": "groups"},
    ),
)
SPEED = (
    Panel(
        id="gantt",
        title="Phases of the last steps",
        unit="seconds since the run began, by the seconds of each phase; traces have the moments",
        missing="no row has wall_s",
        metrics={},
        kind="gantt",
    ),
    Panel(
        id="time",
        title="Time of a step",
        unit="seconds",
        missing="no row has it",
        metrics={
            "perf/step_s": "step",
            "perf/rollout_s": "rollout",
            "perf/experience_s": "experience",
            "perf/train_s": "training",
            "perf/publish_s": "publication",
            "perf/checks_s": "checks",
        },
    ),
    Panel(
        id="throughput",
        title="Throughput",
        unit="tokens/s",
        missing="no row has it",
        metrics={"perf/tokens_per_s_rollout": "rollout", "perf/tokens_per_s_train": "training"},
    ),
    Panel(
        id="samples",
        title="Samples per second",
        unit="samples/s trained",
        missing="a run with a rollout writes perf/samples_per_s",
        metrics={"perf/samples_per_s": "samples"},
    ),
    Panel(
        id="mfu",
        title="Model FLOPs utilization",
        unit="share of the peak",
        missing="set cluster.peak_tflops",
        metrics={"perf/mfu": "MFU"},
        share=True,
    ),
    Panel(
        id="memory",
        title="Memory",
        unit="bytes, largest so far",
        missing="rows of this run have no perf/memory/ figures; perf/held_bytes needs rollout.workers",
        metrics={"perf/memory/*_bytes": "", "perf/held_bytes": "rollout workers"},
    ),
    Panel(
        id="ooms",
        title="Out of memory",
        unit="events since the rank began",
        missing="rows of this run have no perf/memory/ figures",
        metrics={"perf/memory/oom_kills": "processes killed", "perf/memory/device_ooms": "failed allocations"},
    ),
    Panel(
        id="rewarding",
        title="Latency of rewards",
        unit="seconds",
        missing="rows of this run have no perf/reward/ figures",
        metrics={"perf/reward/*_s": ""},
    ),
    Panel(
        id="sync",
        title="Bytes of a publication",
        unit="bytes to each server",
        missing=_ROLLOUT,
        metrics={"sync/bytes": "bytes"},
    ),
    Panel(
        id="servers",
        title="Rollout servers",
        unit="servers; requests",
        missing="written except where servers and trainer take turns",
        metrics={
            "rollout/servers_healthy": "healthy",
            "rollout/restarts": "restarted",
            "rollout/reissued": "requests sent again",
        },
    ),
)
TABS: Mapping[str, Sequence[Panel]] = {
    "overview": OVERVIEW,
    "learning": LEARNING,
    "alignment": ALIGNMENT,
    "ledger": LEDGER,
    "speed": SPEED,
}
# the metrics that are the only line of a panel: a running mean is drawn over their noise
SMOOTHED = frozenset(
    next(iter(panel.metrics))
    for panels in TABS.values()
    for panel in panels
    if panel.kind == "lines" and len(panel.metrics) == 1 and "*" not in next(iter(panel.metrics))
)


def layout() -> dict[str, list[dict[str, Any]]]:
    """The panels as JSON."""
    return {tab: [asdict(panel) | {"metrics": list(panel.metrics.items())} for panel in of] for tab, of in TABS.items()}

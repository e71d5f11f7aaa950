"""Writes the records of each step: a row of metrics, readable samples, and entries of the ledger."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_args

from miles_like import spans
from miles_like.algorithms.advantages.remax import without_greedy
from miles_like.algorithms.terms.mismatch import finish
from miles_like.checkpoint.ledger import Ledger
from miles_like.experience.token_columns import Columns, with_agreement
from miles_like.limits.memory_size import peak_host_bytes
from miles_like.loop.buffer import Taken
from miles_like.loop.rollout_stats import Rewards, total
from miles_like.loop.step_bounds import StepBounds
from miles_like.protocols import Fencing, MetricSink, RewardLog
from miles_like.report.episodes import episode_metrics
from miles_like.report.metrics import rollout_metrics, write_rollouts
from miles_like.report.progress import PhaseBar
from miles_like.report.speed import SpeedMeter
from miles_like.types import PublishReport, SampleGroup, SharedExperts, StepReport


class TurnTimes(Protocol):
    """Seconds that rollout servers and trainer took to change turns (miles_like.turns)."""

    def metrics(self) -> Mapping[str, float]:
        """`perf/turn/...` since the last call."""


class GroupStore(Protocol):
    """Where the values of the samples' tokens are: in this process, or in rollout workers."""

    def write_rollouts(self, path: Path, groups: Sequence[SampleGroup], columns: Sequence[Sequence[Columns]]) -> None:
        """As `report.metrics.write_rollouts`; it may return before the file is written."""

    def release(self, groups: Sequence[SampleGroup]) -> None:
        """Frees the values of groups that are trained."""

    def metrics(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class InThisProcess:
    """Values live as long as their groups do. rewards: what has called them."""

    rewards: RewardLog | None = None

    def write_rollouts(self, path: Path, groups: Sequence[SampleGroup], columns: Sequence[Sequence[Columns]]) -> None:
        write_rollouts(path, groups, columns)

    def release(self, groups: Sequence[SampleGroup]) -> None:
        """There is nothing else to free."""

    def metrics(self) -> Mapping[str, float]:
        return {} if self.rewards is None else self.rewards.metrics()


Phase = Literal["experience", "train", "save", "publish", "checks"]


class Curriculum(Protocol):
    """A prompt source that uses rewards to decide which prompts to skip for some epochs."""

    def observe(self, measured: Iterable[Rewards]) -> Mapping[str, float]:
        """Returns `curriculum/...` of the step."""


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """Measurements of one step, in the order in which the loop makes them."""

    step: int  # steps done before this one
    progress: PhaseBar
    began: float = field(default_factory=time.perf_counter)
    taken: Sequence[Taken] = ()  # what the step trains
    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(get_args(Phase), 0.0))
    rollout: Mapping[str, float] = field(default_factory=dict)  # of the sampled groups
    tokens: int = 0  # response tokens among them
    metrics: dict[str, float] = field(default_factory=dict)  # of the trainer and of the experience
    published: PublishReport | None = None
    columns: Sequence[Sequence[Columns]] = ()  # values of tokens for the samples' file
    agreement: Sequence[Mapping[str, SharedExperts]] = ()  # as in StepReport

    @contextmanager
    def timed(self, phase: Phase) -> Iterator[None]:
        """Adds the seconds of the body to `perf/{phase}_s`; those of "save" are not part of the step."""
        if phase in ("train", "publish"):
            self.progress.phase(self.step, phase)
        began = time.perf_counter()
        with spans.span(phase, step=self.step + 1, version=self.step) as span:
            if phase == "train" and spans.on():
                span.add(samples=[s.name for t in self.taken for s in t.group.samples])
            yield
        self.seconds[phase] += time.perf_counter() - began

    def trained(self, report: StepReport) -> None:
        self.metrics, self.agreement = finish(report.metrics), report.agreement


@dataclass(kw_only=True)
class Recorder:
    """Writes the rows of `metrics.jsonl` and the other sinks, `rollouts/step_N.jsonl`, and trained samples into the
    ledger."""

    sink: MetricSink
    ledger: Ledger
    progress: PhaseBar
    bounds: StepBounds = field(default_factory=StepBounds)
    speed: SpeedMeter = field(default_factory=SpeedMeter)
    samples: Path | None = None  # directory; None: samples are not written
    fence: Fencing | None = None  # of the run directory
    curriculum: Curriculum | None = None
    episodes: bool = False  # whether samples have turns
    greedy: bool = False  # whether the first sample of a group is greedy, which is not trained on
    turns: TurnTimes | None = None  # None: servers and trainer do not take turns
    store: GroupStore = field(default_factory=InThisProcess)
    tokens_total: int = 0  # response tokens trained since the run began
    earlier_s: float = 0.0  # `wall_s` of the row that the run resumes after
    started: float = field(default_factory=time.perf_counter)
    once: Mapping[str, float] = field(default_factory=dict)  # metrics of the next step's row only

    def start(self) -> None:
        """Start the clock of the metric `wall_s`, which continues from the checkpoint's value."""
        self.started = time.perf_counter() - self.earlier_s

    def begin(self, step: int) -> StepRecord:
        return StepRecord(step=step, progress=self.progress)

    def sampled(self, record: StepRecord, taken: Sequence[Taken]) -> Sequence[SampleGroup]:
        """Returns the groups of `taken` and stores their metrics in the record."""
        record.taken, groups = taken, [t.group for t in taken]
        trained, greedy = without_greedy(groups) if self.greedy else (groups, [])
        metrics = rollout_metrics(trained, version=record.step)
        if greedy:
            metrics["rollout/reward/greedy"] = statistics.fmean(greedy)
        if self.episodes:
            metrics |= episode_metrics(trained)
        tokens = sum(s.response_len for g in trained for s in g.samples)
        self.tokens_total += tokens - record.tokens  # of groups that were lost before they were trained
        record.tokens = tokens
        record.rollout = metrics | {"tokens_total": float(self.tokens_total)}
        return groups

    def check(self, record: StepRecord) -> None:
        """Writes the samples of a trained step, then checks its metrics against the run's bounds. The samples are
        written first, because they show why a run stops. Raises RuntimeError as `StepBounds.check`, and as
        `Fencing.check` before anything is written."""
        done = record.step + 1
        if self.fence is not None:
            self.fence.check()
        if self.samples is not None:
            groups = [t.group for t in record.taken]
            columns = with_agreement(record.columns, groups, record.agreement)
            self.store.write_rollouts(self.samples / f"step_{done}.jsonl", groups, columns)
        self.bounds.check(done, record.metrics)

    def row(self, record: StepRecord, waiting: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a published step. waiting: those of the groups that are not trained (`Feed.metrics`)."""
        now, report, seconds = time.perf_counter(), record.published, record.seconds
        if report is None:
            raise RuntimeError(f"step {record.step} is recorded before its weights are published")
        groups, step_s = [t.group for t in record.taken], now - record.began - seconds["save"]
        spans.ended("step", now - record.began, step=record.step + 1, version=record.step)
        stats = total(t.stats for t in record.taken)
        rollout_s = stats.seconds or step_s  # where prompts are admitted freely, some are always in flight
        return {
            **record.rollout,
            **record.metrics,
            "perf/experience_s": seconds["experience"],
            "perf/train_s": seconds["train"],
            "perf/publish_s": seconds["publish"],
            "perf/checks_s": seconds["checks"],
            "perf/pause_s": report.pause_seconds,
            "sync/bytes": float(report.bytes),
            "sync/seconds": report.seconds,
            **({} if report.triton is None else {"sync/triton": report.triton}),
            **({} if report.packed is None else {"sync/packed": report.packed}),
            **({} if report.decoding is None else {"rollout/triton": report.decoding}),
            **({} if report.whole_bytes is None else {"sync/delta_frac": report.bytes / report.whole_bytes}),
            **stats.metrics(),
            "perf/rollout_s": rollout_s,
            "perf/step_s": step_s,
            **self.speed.metrics(groups, rollout_s=rollout_s, train_s=seconds["train"]),
            **({} if self.turns is None else self.turns.metrics()),
            "perf/samples_per_s": sum(len(g.samples) for g in groups) / step_s,
            **self.store.metrics(),
            "perf/memory/driver_bytes": peak_host_bytes(),
            **waiting,
        }

    def write_step(self, record: StepRecord, row: Mapping[str, float]) -> None:
        """Enters the trained samples into the ledger, then writes the row of the step."""
        done = record.step + 1
        for t in record.taken:
            self.ledger.train(done, t.group_id, t.group)
        self.store.release([t.group for t in record.taken])
        row, self.once = {**row, **self.once}, {}
        if self.curriculum is not None:
            row = {**row, **self.curriculum.observe([r for t in record.taken for r in t.stats.rewards])}
        self.write_end(done, row)

    def write_first(self, step: int, evaluated: Mapping[str, float]) -> None:
        """Writes the row before the first step of a run."""
        self.sink.write(step, {"weight_version": float(step), **evaluated})

    def write_end(self, step: int, row: Mapping[str, float]) -> None:
        """Writes `row` with the wall time in seconds and the totals of the ledger."""
        wall = {"wall_s": time.perf_counter() - self.started}
        self.sink.write(step, {"weight_version": float(step), **wall, **row, **self.ledger.metrics()})

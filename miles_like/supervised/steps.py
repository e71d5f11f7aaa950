"""Training on given examples instead of sampled ones: the objectives and the loop.

A step takes the next examples and trains on them once. There is no rollout, no buffer and no publication, so weight
version s is the weights after s steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from miles_like import spans
from miles_like.algorithms.dpo import DpoLoss
from miles_like.algorithms.kto import KtoLoss
from miles_like.algorithms.orpo import OrpoLoss
from miles_like.algorithms.process_reward import ProcessRewardLoss
from miles_like.algorithms.reward_model import BradleyTerryLoss
from miles_like.algorithms.sft import NllLoss
from miles_like.algorithms.simpo import SimpoLoss
from miles_like.batch.packer import Packer
from miles_like.checkpoint.writer import Snapshot
from miles_like.config.sections.supervised import SUPERVISED, Sigmoid, SupervisedConfig
from miles_like.loop.saver import Saver
from miles_like.protocols import LossFn, MetricSink, Trainer
from miles_like.report.progress import PhaseBar
from miles_like.report.speed import SpeedMeter
from miles_like.supervised.baseline import MismatchedKl
from miles_like.types import Aggregation, SampleGroup, TrainBatch
from rollout.prompts.order import Cursor, Order

# metric of the trainer on held-out examples -> its name under eval/{set}/
_HELD_OUT = {
    "train/loss": "loss",
    "train/answer_prob": "answer_prob",
    "preference/accuracy": "accuracy",
    "process/accuracy": "accuracy",
    "preference/margin": "margin",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss and the aggregation of its token losses; for pairs the aggregation is the mean over pairs. has_baseline:
    the loss needs the stream of `MismatchedKl`."""

    loss: LossFn
    aggregation: Aggregation
    has_baseline: bool = False


def make_objective(name: str, config: SupervisedConfig) -> Objective:
    """`name`: algorithm.name, one of SUPERVISED."""
    assert name in SUPERVISED, name
    if name == "sft":
        return Objective(loss=NllLoss(), aggregation=Aggregation(config.aggregation))
    if name == "process_reward":
        return Objective(loss=ProcessRewardLoss(), aggregation=Aggregation(config.aggregation))
    loss = _preference_loss(name, config)
    return Objective(loss=loss, aggregation=Aggregation.SEQUENCE_MEAN, has_baseline=isinstance(loss, KtoLoss))


def _preference_loss(name: str, config: SupervisedConfig) -> LossFn:
    beta, form = config.beta, config.dpo
    smoothing = form.label_smoothing if isinstance(form, Sigmoid) else 0.0
    match name:
        case "dpo":
            return DpoLoss(kind=form.loss, beta=beta, label_smoothing=smoothing)
        case "kto":
            weights = {"desirable_weight": config.desirable_weight, "undesirable_weight": config.undesirable_weight}
            return KtoLoss(beta=beta, **weights)
        case "orpo":
            return OrpoLoss(beta=beta)
        case "simpo":
            return SimpoLoss(beta=beta, margin=config.margin, label_smoothing=smoothing)
    return BradleyTerryLoss(center_coefficient=config.center_coefficient)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Examples as the batch that the loss needs."""

    packer: Packer
    baseline: MismatchedKl | None = None

    async def of(self, examples: Sequence[SampleGroup]) -> TrainBatch:
        """Raises ValueError as `pack`, and RuntimeError when a rank fails."""
        return self.packer.examples(examples if self.baseline is None else await self.baseline.add(examples))


async def held_out_metrics(
    trainer: Trainer, batches: Batches, sets: Mapping[str, Sequence[SampleGroup]]
) -> dict[str, float]:
    """`eval/{set}/loss` of each set, and the other metrics of _HELD_OUT that the loss has. Nothing is trained."""
    out = dict[str, float]()
    for name, examples in sets.items():
        found = await trainer.evaluate(await batches.of(examples))
        out |= {f"eval/{name}/{short}": found[key] for key, short in _HELD_OUT.items() if key in found}
    return out


@dataclass(slots=True, kw_only=True)
class ExampleFeed:
    """Examples in the order of the run's seed; its state is the number consumed, counted over epochs."""

    examples: Sequence[SampleGroup]
    order: Order
    groups: int  # a step
    consumed: int = 0
    tokens_total: int = 0  # response tokens trained

    def take(self) -> list[SampleGroup]:
        """The examples of the next step."""
        taken = [self.examples[i] for i in self.order.take(self.groups)]
        self.consumed += len(taken)
        self.tokens_total += sum(s.response_len for g in taken for s in g.samples)
        return taken

    def restore(self, consumed: int, tokens_total: int) -> None:
        self.consumed, self.tokens_total = consumed, tokens_total
        self.order.restore(Cursor(*divmod(consumed, len(self.order))))

    async def snapshot(self, step: int, whole: bool) -> Snapshot:
        return Snapshot(parts={"prompts": self.consumed}, tokens_total=self.tokens_total)


@dataclass(kw_only=True)
class SupervisedLoop:
    """The training loop of one run. held_out: set name -> examples. eval_every: steps between two evaluations, besides
    those before the first and after the last step; 0: never. earlier_s: `wall_s` of the row that the run resumes
    after. once: metrics of the next step's row only."""

    trainer: Trainer
    feed: ExampleFeed
    batches: Batches
    held_out: Mapping[str, Sequence[SampleGroup]]
    speed: SpeedMeter
    sink: MetricSink
    saver: Saver
    progress: PhaseBar
    eval_every: int
    earlier_s: float = 0.0
    once: Mapping[str, float] = field(default_factory=dict)

    async def run(self, *, first: int, steps: int) -> int:
        """Runs steps first .. steps - 1; step s trains on weight version s and ends in version s + 1. On a stop request
        it saves the step that it has trained and raises Stopped. Returns the steps done."""
        started = time.perf_counter() - self.earlier_s
        self.saver.begin(first)
        self.saver.deadline.note()
        if not first:  # a resumed run has written this row
            self.sink.write(0, {"weight_version": 0.0, **await self._evaluate(0)})
        for step in range(first, steps):
            if self.saver.stop.asked:
                break
            began = time.perf_counter()
            self.progress.phase(step, "train")
            examples = self.feed.take()
            with spans.span("train", step=step + 1, version=step) as span:
                if spans.on():
                    span.add(samples=[s.name for g in examples for s in g.samples])
                report = await self.trainer.train([await self.batches.of(examples)])
            train_s = time.perf_counter() - began
            tokens = {"tokens_total": float(self.feed.tokens_total)}
            metrics = {**report.metrics, **tokens, **self.speed.metrics(examples, train_s=train_s)}
            metrics |= {"perf/train_s": train_s, "perf/step_s": time.perf_counter() - began}
            metrics.pop("routing/replay_coverage", None)  # there are no routes to replay
            done, last = step + 1, step + 1 == steps
            spans.ended("step", metrics["perf/step_s"], step=done, version=step)
            if self.eval_every and (last or done % self.eval_every == 0):
                metrics |= await self._evaluate(done)
            now = time.perf_counter()
            metrics |= {"wall_s": now - started, **self.once}
            self.once = {}
            self.sink.write(done, {"weight_version": float(done), **metrics})
            await self.saver.boundary(done, last=last, step_s=now - began)
        return await self.saver.end(steps)

    async def _evaluate(self, version: int) -> Mapping[str, float]:
        if not self.eval_every:
            return {}
        self.progress.phase(version, "evaluate")
        with spans.span("evaluate", version=version):
            return await held_out_metrics(self.trainer, self.batches, self.held_out)

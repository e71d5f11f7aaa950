"""Training on what is given instead of sampled: the objectives by name, and the loop, on one page.

A step takes the next examples, trains on them once, and that is all: there is no rollout, no buffer and nothing to
publish, so weight version s is simply the weights after s steps.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from miles_like.algorithms.dpo import DpoLoss
from miles_like.algorithms.reward_model import BradleyTerryLoss
from miles_like.algorithms.sft import NllLoss
from miles_like.protocols import LossFn, MetricSink, Trainer
from miles_like.stopping import Deadline, StopRequest
from miles_like.supervised_config import SUPERVISED, SupervisedConfig
from miles_like.types import Aggregation, SampleGroup, TrainBatch

# what the trainer says of held-out examples -> its name under eval/{set}/
_HELD_OUT = {
    "train/loss": "loss",
    "train/answer_prob": "answer_prob",
    "preference/accuracy": "accuracy",
    "preference/margin": "margin",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss, and how the losses of tokens become one number: of pairs, the mean over pairs."""

    loss: LossFn
    aggregation: Aggregation


def make_objective(name: str, config: SupervisedConfig) -> Objective:
    """`name`: algorithm.name, one of SUPERVISED."""
    assert name in SUPERVISED, name
    if name == "sft":
        return Objective(loss=NllLoss(), aggregation=Aggregation(config.aggregation))
    if name == "dpo":
        dpo = DpoLoss(kind=config.loss, beta=config.beta, label_smoothing=config.label_smoothing)
        return Objective(loss=dpo, aggregation=Aggregation.SEQUENCE_MEAN)
    ranking = BradleyTerryLoss(center_coefficient=config.center_coefficient)
    return Objective(loss=ranking, aggregation=Aggregation.SEQUENCE_MEAN)


async def held_out_metrics(trainer: Trainer, sets: Mapping[str, TrainBatch]) -> dict[str, float]:
    """`eval/{set}/loss` of each set, and what else there is of _HELD_OUT. Nothing changes."""
    out = {}
    for name, batch in sets.items():
        found = await trainer.evaluate(batch)
        out |= {f"eval/{name}/{short}": found[key] for key, short in _HELD_OUT.items() if key in found}
    return out


@dataclass(kw_only=True)
class SupervisedLoop:
    """The parts, behind seams."""

    trainer: Trainer
    next_examples: Callable[[], Sequence[SampleGroup]]  # one step's worth
    pack: Callable[[Sequence[SampleGroup]], TrainBatch]
    evaluate: Callable[[], Awaitable[Mapping[str, float]]]
    describe: Callable[[Sequence[SampleGroup], float], Mapping[str, float]]  # examples trained, in so many seconds
    save: Callable[[int], Awaitable[None]]  # checkpoint after a step; it may still be under way when this returns
    finish_save: Callable[[bool], Awaitable[None]]  # complete it if it is written, or (True) wait until it is
    phase: Callable[[int, str], None]  # what is going on, for a progress bar
    sink: MetricSink
    stop: StopRequest
    deadline: Deadline
    eval_every: int  # 0: only before the first and after the last step
    save_every: int  # 0: only after the last step

    async def run(self, *, first: int, steps: int) -> int:
        """Steps first .. steps-1; step s trains on weight version s and ends in version s + 1. Asked to stop, it saves
        the step that it is at. Returns the steps done."""
        started = time.perf_counter()
        self.deadline.note()
        if not first:  # of a resumed run it is there
            self.sink.write(0, {"weight_version": 0.0, **await self._evaluate(0)})
        for step in range(first, steps):
            began = time.perf_counter()
            self.phase(step, "train")
            examples = self.next_examples()
            report = await self.trainer.train([self.pack(examples)])
            seconds = time.perf_counter() - began
            metrics = {**report.metrics, **self.describe(examples, seconds), "perf/train_s": seconds}
            metrics.pop("routing/replay_coverage", None)  # there are no routes to replay
            done, last = step + 1, step + 1 == steps
            if last or (self.eval_every and done % self.eval_every == 0):
                metrics |= await self._evaluate(done)
            now = time.perf_counter()
            metrics |= {"perf/step_s": now - began, "wall_s": now - started}
            self.sink.write(done, {"weight_version": float(done), **metrics})
            self.deadline.note(time.perf_counter() - began)
            ends = last or self.stop.asked  # looked at once: what is asked from here on is for the next step
            if ends or (self.save_every and done % self.save_every == 0):
                self.phase(step, "save")
                await self.save(done)
            await self.finish_save(ends)
            if ends:
                return done
        return steps

    async def _evaluate(self, version: int) -> Mapping[str, float]:
        self.phase(version, "evaluate")
        return await self.evaluate()

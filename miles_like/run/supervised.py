"""One supervised training run: reads the examples, starts the trainer ranks, runs the loop and writes the report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console

from miles_like.checkpoint import run_state
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.loop.saver import Saver
from miles_like.protocols import LossFn
from miles_like.report.progress import PhaseBar
from miles_like.run.rebuild.ranks import RunRanks, start_ranks
from miles_like.run.rebuild.rebuilding import RebuildingRun
from miles_like.run.setup.launcher import Launcher, freeze_gc
from miles_like.run.setup.model_plan import ModelPlan
from miles_like.run.setup.trainer_side import Resumed, RunFiles, packer, speed_meter
from miles_like.stopping import Deadline, StopRequest, run_began, run_to_end
from miles_like.supervised.baseline import MismatchedKl
from miles_like.supervised.data import ExampleReader
from miles_like.supervised.steps import Batches, ExampleFeed, Objective, SupervisedLoop, make_objective
from miles_like.types import SampleGroup
from rollout.prompts.order import Order

HeldOut = Mapping[str, Sequence[SampleGroup]]  # examples by the name of their set


def train_supervised(plan: ModelPlan, console: Console, *, resume: bool, launcher: Launcher | None = None) -> None:
    """Runs the steps of the configuration, from the latest checkpoint with `resume`, and writes the report. Raises as
    `miles_like.run.train.train` does."""
    c, launcher = plan.config, launcher or Launcher()
    launcher.check(plan)
    objective = make_objective(c.algorithm.name, c.supervised)
    examples, held_out = read_examples(plan)
    files = RunFiles(plan, console)
    resumed = files.resume() if resume else None
    files.begin()
    if c.trace.on:
        files.traces.ask(launcher.clocks(plan))
    started = time.perf_counter()
    ranks = start_ranks(launcher, plan, objective.loss)
    run = SupervisedRun(
        files=files,
        launcher=launcher,
        console=console,
        objective=objective,
        examples=examples,
        held_out=held_out,
        resumed=resumed,
        ranks=ranks,
    )
    sets = ", ".join(f"{name} {len(x)}" for name, x in held_out.items()) or "none"
    ready = f"Ready in {time.perf_counter() - started:.0f} s: {len(plan.placement.of('trainer'))} trainer ranks."
    run.say(f"{ready} {len(examples)} examples; held out: {sets}.")
    try:
        run_to_end(run.through_losses(), run.stop, c.checkpoint.grace_s)
    finally:
        files.close()
    files.end()


def read_examples(plan: ModelPlan) -> tuple[list[SampleGroup], dict[str, list[SampleGroup]]]:
    """Training examples, and held-out ones by the name of their set. Raises ValueError as `ExampleReader.read`."""
    c = plan.config
    reader = ExampleReader(
        tokenizer=plan.tokenizer,
        data=c.data,
        keys=c.supervised,
        algorithm=c.algorithm.name,
        max_tokens=c.max_pack_tokens,
    )
    if c.data.train is None:
        raise ValueError("data.train is not set: set it to the file of the examples")
    held_out = {s.name: reader.read(s.path)[: s.max_prompts] for s in c.eval_sets}
    for name, groups in held_out.items():
        if c.algorithm.name == "kto" and len(groups) < 2:
            raise ValueError(
                f"eval set {name!r} has {len(groups)} row, but KTO's baseline pairs the prompt of each row with "
                "the answer of another row: use a set of at least 2 rows, or raise eval.max_prompts"
            )
    return reader.read(c.data.train), held_out


class SupervisedRun(RebuildingRun):
    """A run whose ranks are up: composes the objects of the loop, and closes them."""

    def __init__(
        self,
        *,
        files: RunFiles,
        launcher: Launcher,
        console: Console,
        objective: Objective,
        examples: Sequence[SampleGroup],
        held_out: HeldOut,
        resumed: Resumed | None,
        ranks: RunRanks,
    ) -> None:
        self.files, self.launcher, self.console, self.resumed = files, launcher, console, resumed
        self.objective, self.examples, self.held_out = objective, examples, held_out
        self.stop = StopRequest()
        self.deadline = Deadline(self.stop, files.plan.config.checkpoint.deadline_s, began=run_began())
        self.attach(ranks)

    @property
    def loss(self) -> LossFn:
        return self.objective.loss

    @property
    def ranks(self) -> Sequence[RayTrainer]:
        return [self.trainer]

    def attach(self, ranks: RunRanks) -> None:
        self.trainer = ranks.trainer

    async def run(self) -> None:
        """Runs the loop to its end, and closes the ranks. Raises as `SupervisedLoop.run`."""
        try:
            first, feed = 0, self.feed()
            if self.resumed is not None:
                state = self.resumed.state
                first, consumed = state.step, run_state.consumed_rows(state)
                await self.resumed.load({"trainer": self.trainer})
                feed.restore(consumed, state.tokens_total)
            with PhaseBar(self.files.plan.config.train.steps, self.console) as progress:
                await self.steps(first, feed, progress)
        finally:
            await self.trainer.close()

    async def steps(self, first: int, feed: ExampleFeed, progress: PhaseBar) -> None:
        """Runs the loop from step `first`."""
        loop = self.compose(first, feed, progress)
        freeze_gc()
        self.go_on(loop, first)
        try:
            await loop.run(first=first, steps=self.files.plan.config.train.steps)
        except BaseException as e:
            self.files.ends = not self.goes_on(e)
            raise
        finally:
            self.deadline.close()
            loop.sink.close()

    def feed(self) -> ExampleFeed:
        c = self.files.plan.config
        order = Order(len(self.examples), seed=c.seed)
        return ExampleFeed(examples=self.examples, order=order, groups=c.train.groups_per_step)

    def compose(self, first: int, feed: ExampleFeed, progress: PhaseBar) -> SupervisedLoop:
        plan, c = self.files.plan, self.files.plan.config
        packs = packer(plan, c.parallel.dp, replayed=True, balanced=True, aggregation=self.objective.aggregation)
        baseline = MismatchedKl(trainer=self.trainer, packer=packs) if self.objective.has_baseline else None
        return SupervisedLoop(
            trainer=self.trainer,
            feed=feed,
            batches=Batches(packer=packs, baseline=baseline),
            held_out=self.held_out,
            speed=speed_meter(plan),
            sink=self.files.sink(first),
            saver=Saver(
                state=feed,
                checkpoints=self.files.checkpoints({"trainer": self.trainer}, self.resumed),
                stop=self.stop,
                deadline=self.deadline,
                progress=progress,
                every=c.checkpoint.every,
            ),
            progress=progress,
            eval_every=c.eval.every,
            earlier_s=self.files.earlier_s,
        )

"""One supervised training run: reads the examples, starts the trainer ranks, runs the loop and writes the report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console

from miles_like.checkpoint import run_state
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.loop.saver import Saver
from miles_like.report.progress import PhaseBar
from miles_like.run.setup.launcher import Launcher, freeze_gc
from miles_like.run.setup.model_plan import ModelPlan
from miles_like.run.setup.trainer_side import Resumed, RunFiles, packer, speed_meter
from miles_like.stopping import Deadline, StopRequest, run_began, run_to_end
from miles_like.supervised.baseline import MismatchedKl
from miles_like.supervised.data import ExampleReader
from miles_like.supervised.steps import Batches, ExampleFeed, SupervisedLoop, make_objective
from miles_like.types import SampleGroup
from rollout.prompts.order import Order


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
    trainer = launcher.trainer(plan, objective.loss)
    sets = ", ".join(f"{name} {len(x)}" for name, x in held_out.items()) or "none"
    ready = f"Ready in {time.perf_counter() - started:.0f} s: {len(plan.placement.of('trainer'))} trainer ranks."
    line = f"{'':12}{ready} {len(examples)} examples; held out: {sets}."
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    packs = packer(plan, c.parallel.dp, replayed=True, balanced=True, aggregation=objective.aggregation)
    stop = StopRequest()
    baseline = MismatchedKl(trainer=trainer, packer=packs) if objective.has_baseline else None
    batches = Batches(packer=packs, baseline=baseline)
    try:
        run_to_end(_loop(files, resumed, trainer, batches, examples, held_out, stop), stop, c.checkpoint.grace_s)
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


async def _loop(
    files: RunFiles,
    resumed: Resumed | None,
    trainer: RayTrainer,
    batches: Batches,
    examples: Sequence[SampleGroup],
    held_out: Mapping[str, Sequence[SampleGroup]],
    stop: StopRequest,
) -> None:
    plan, c = files.plan, files.plan.config
    models = {"trainer": trainer}
    feed = ExampleFeed(examples=examples, order=Order(len(examples), seed=c.seed), groups=c.train.groups_per_step)
    first = 0
    if resumed is not None:
        state = resumed.state
        first, consumed = state.step, run_state.consumed_rows(state)
        await resumed.load(models)
        feed.restore(consumed, state.tokens_total)
    deadline = Deadline(stop, c.checkpoint.deadline_s, began=run_began())
    sink = files.sink(first)
    with PhaseBar(c.train.steps, files.console) as progress:
        loop = SupervisedLoop(
            trainer=trainer,
            feed=feed,
            batches=batches,
            held_out=held_out,
            speed=speed_meter(plan),
            sink=sink,
            saver=Saver(
                state=feed,
                checkpoints=files.checkpoints(models, resumed),
                stop=stop,
                deadline=deadline,
                progress=progress,
                every=c.checkpoint.every,
            ),
            progress=progress,
            eval_every=c.eval.every,
            earlier_s=files.earlier_s,
        )
        freeze_gc()
        try:
            await loop.run(first=first, steps=c.train.steps)
        finally:
            deadline.close()
            sink.close()
            await trainer.close()

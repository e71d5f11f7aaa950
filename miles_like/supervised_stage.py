"""One run of supervised fine-tuning, DPO or reward-model training, wired: trainer ranks, examples and sinks around the
loop, then the report. No server is started."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from miles_like import run_state
from miles_like.config import RunConfig
from miles_like.config_io import store_config
from miles_like.controller import settle
from miles_like.packing import pack_examples
from miles_like.progress import PhaseBar
from miles_like.report import write_report
from miles_like.run_state import RunState
from miles_like.stopping import run_to_end
from miles_like.supervised import SupervisedLoop, held_out_metrics, make_objective
from miles_like.supervised_data import ExampleReader
from miles_like.trainer_parts import TrainerParts
from miles_like.types import SampleGroup, TrainBatch
from miles_like.workers import RayTrainer, check_nodes
from rollout.order import Cursor, Order


class SupervisedStage(TrainerParts):
    """The parts of one training run, started, wired and stopped."""

    def __init__(self, config: RunConfig, run_dir: Path, served: Path, weights: Path, console: Console) -> None:
        super().__init__(config, run_dir, served, weights, console)
        self.objective = make_objective(config.algorithm.name, config.supervised)
        self.dealt = 0  # rows of data.train, counted over epochs

    def run(self, resume: bool) -> None:
        c = self.config
        check_nodes(self.plan)
        reader = ExampleReader(
            tokenizer=self.tokenizer,
            data=c.data,
            keys=c.supervised,
            algorithm=c.algorithm.name,
            max_tokens=c.max_pack_tokens,
        )
        assert c.data.train is not None, "the configuration asks for it"
        examples = reader.read(c.data.train)
        held_out = {s.name: reader.read(s.path)[: s.max_prompts] for s in c.eval_sets}
        began = self.resumed() if resume else None
        store_config(c, self.run_dir / "config.toml")
        started = time.perf_counter()
        trainer = self.started(self.objective.loss)
        self.console.print(
            f"{'':12}{len(self.plan.of('trainer'))} trainer ranks up after {time.perf_counter() - started:.0f} s; "
            f"{len(examples)} examples, held out: {', '.join(f'{n} {len(x)}' for n, x in held_out.items()) or 'none'}"
        )
        run_to_end(self._loop(trainer, examples, held_out, began), self.stop, c.checkpoint.grace_s)
        write_report(self.run_dir)
        self.console.print(f"{'':12}report: {self.run_dir / 'report.html'}")

    async def _loop(
        self,
        trainer: RayTrainer,
        examples: Sequence[SampleGroup],
        held_out: Mapping[str, Sequence[SampleGroup]],
        began: tuple[Path, RunState] | None,
    ) -> None:
        c = self.config
        order = Order(len(examples), seed=c.seed)
        first = 0 if began is None else await self._resume(trainer, order, *began)
        sets = {name: self.pack(groups) for name, groups in held_out.items()}
        sink = self.sink(first)
        with PhaseBar(c.train.steps, self.console) as (progress, task):
            loop = SupervisedLoop(
                trainer=trainer,
                next_examples=lambda: [examples[i] for i in order.take(c.train.groups_per_step)],
                pack=self.pack,
                evaluate=partial(held_out_metrics, trainer, sets),
                describe=self._describe,
                save=lambda step: self.save(trainer, step, {"prompts": self.dealt}),
                finish_save=partial(self.finish_save, trainer),
                phase=lambda step, name: progress.update(task, completed=step, phase=name),
                sink=sink,
                stop=self.stop,
                deadline=self.deadline,
                eval_every=c.eval.every,
                save_every=c.checkpoint.every,
            )
            settle()
            try:
                done = await loop.run(first=first, steps=c.train.steps)
            finally:
                self.deadline.close()
                sink.close()
                await trainer.close()
        if done < c.train.steps:
            raise self.stop.stopped(self.saved)

    async def _resume(self, trainer: RayTrainer, order: Order, folder: Path, state: RunState) -> int:
        """The first step."""
        self.tokens_total, self.dealt = state.tokens_total, run_state.dealt(state)
        await self.load(trainer, folder, state)
        order.restore(Cursor(*divmod(self.dealt, len(order))))
        return state.step

    def pack(self, groups: Sequence[SampleGroup]) -> TrainBatch:
        rows = self.rows(self.config.parallel.dp)
        return pack_examples(groups, aggregation=self.objective.aggregation, cost=self.cost, **rows)

    def _describe(self, groups: Sequence[SampleGroup], train_s: float) -> dict[str, float]:
        self.dealt += len(groups)
        self.tokens_total += sum(s.response_len for g in groups for s in g.samples)
        return {"tokens_total": float(self.tokens_total), **self.speed(groups, train_s=train_s)}

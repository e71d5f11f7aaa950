"""One training run, wired: servers, trainer ranks, prompts, reward and sinks around the loop, then the report."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from miles_like.algorithms.advantages.shuffle import shuffle_over_batch
from miles_like.algorithms.filters import make_filter
from miles_like.algorithms.registry import make_bounds
from miles_like.algorithms.truncation import make_overlong, mask_truncated
from miles_like.buffer import DataBuffer
from miles_like.config_io import store_config
from miles_like.controller import Controller, settle
from miles_like.distillation import Teachers
from miles_like.evaluation import HeldOut, evaluate, held_out
from miles_like.experience import Experience
from miles_like.ledger import Ledger
from miles_like.loop_state import LoopState
from miles_like.metrics import rollout_metrics, turn_metrics, write_rollouts
from miles_like.packing import pack, pack_steps
from miles_like.preflight import check_over_sampling
from miles_like.producer import Producer, Rollout
from miles_like.progress import PhaseBar
from miles_like.protocols import RewardFn, RolloutEngine
from miles_like.report import write_report
from miles_like.rewards.load import Rewards
from miles_like.run_checks import RunChecks
from miles_like.run_parts import RunParts
from miles_like.run_state import RunState
from miles_like.run_teachers import RunTeachers
from miles_like.stale_tokens import mask_old
from miles_like.stopping import run_to_end
from miles_like.trainer_parts import LEDGER
from miles_like.types import Prompt, PublishReport, SampleGroup, TrainBatch
from miles_like.verify.allowance import of_steps
from miles_like.verify.gate import judge
from miles_like.workers import RayTrainer, check_nodes
from rollout.client import SGLangClient, seed_of
from rollout.contamination import decontaminated
from rollout.episode import groups_as_they_end
from rollout.kept import Kept
from rollout.pool import EnginePool
from rollout.prompts import PromptSource


class TrainStage(RunParts):
    """The parts of one training run, started, wired and stopped."""

    critic_ranks: RayTrainer | None = None

    def trained(self, trainer: RayTrainer) -> dict[str, RayTrainer]:
        return {"trainer": trainer} | ({} if self.critic_ranks is None else {"critic": self.critic_ranks})

    def run(self, resume: bool) -> None:
        check_nodes(self.plan)
        rewards, data = Rewards(self.config.reward), self.config.data
        check_over_sampling(self.config, rewards(None))
        compared_by = rewards(None).compares
        source = PromptSource(data, self.tokenizer, seed=self.config.seed, compared_by=compared_by)
        held = held_out(self.config.eval_sets, data, self.tokenizer, rewards)
        shared = decontaminated(source, {h.config.name: h.prompts for h in held}, data.decontaminate)
        for sentence in (*source.said, *shared):
            self.console.print(f"{'':12}{sentence}", markup=False, soft_wrap=True)
        began = self.resumed() if resume else None
        store_config(self.config, self.run_dir / "config.toml")
        teachers = RunTeachers(
            self.config,
            self.run_dir,
            student=self.hf.config,
            tokenizer=self.tokenizer,
            console=self.console,
            key=self.key,
        )
        teachers.prepare()
        started = time.perf_counter()
        with contextlib.ExitStack() as stopping:
            stopping.callback(teachers.stop)  # from here on, also where the run's own servers cannot be started
            teachers.launch()
            servers = self.servers(began[1].weight_version if began else 0)
            stopping.callback(servers.stop)
            trainer, self.critic_ranks = self.ranks(), self.critic()
            urls = servers.wait()
            teachers.wait()
            critics = "" if self.critic_ranks is None else f" and {len(self.plan.critics())} of the critic"
            self.console.print(
                f"{'':12}{len(self.plan.of('trainer'))} trainer ranks{critics}, {len(urls)} rollout servers up "
                f"after {time.perf_counter() - started:.0f} s{self.payload()}"
            )
            loop = self._loop(trainer, urls, source, rewards, held, began, teachers)
            run_to_end(loop, self.stop, self.config.checkpoint.grace_s)
        write_report(self.run_dir)
        self.console.print(f"{'':12}report: {self.run_dir / 'report.html'}")

    async def _loop(
        self,
        trainer: RayTrainer,
        urls: Sequence[str],
        source: PromptSource,
        rewards: Rewards,
        held: Sequence[HeldOut],
        began: tuple[Path, RunState] | None,
        teaching: RunTeachers,
    ) -> None:
        config = self.config
        bounds = of_steps(make_bounds(config.mismatch), exact=config.exact_steps)
        clients = [self.client(url) for url in urls]
        await self.check_bits(trainer, clients)
        # episodes and a user's own generate function have states that are theirs: they begin anew after a resume
        self.kept = Kept(EnginePool(clients), remembers=not config.rollout.played)
        engine = self.play(self.kept)
        examiner = [self.client(url, routing=False) for url in urls]  # nobody trains on its answers
        trainer.connect(self.publisher(urls))
        first, report = await self._begin(trainer, began)
        checks = self._checks(trainer, clients, source)
        await checks.at_start(first, report)
        rows = partial(pack, **self.rows(trainer.dp_size), replayed=False, cost=self.cost)
        teachers = teaching.teachers(trainer, examiner, rows, source.all())
        await teachers.start()
        sink = self.sink(first)
        with PhaseBar(config.train.steps, self.console) as (progress, task):
            controller = self._controller(
                trainer,
                teachers if config.distillation.on else None,
                source,
                began,
                rollout=partial(self._rollout, engine, rewards(None)),
                abort=engine.abort_all,
                evaluate=partial(self._evaluate, examiner, held),
                phase=lambda step, name: progress.update(task, completed=step, phase=name),
                sink=sink,
                judge=partial(judge, bounds, config.mismatch.on_breach, self.console),
                inspect=checks.before_training,
                compare=checks.published,
            )
            settle()
            try:
                await controller.run(first=first, steps=config.train.steps, resumed=began is not None)
                if controller.producer.ended and (self.saved or 0) < config.train.steps:
                    self.console.print(f"{'':12}the prompts have ended: data.epochs = {config.data.epochs}")
            finally:
                self.deadline.close()
                self.console.print(f"{'':12}{controller.ledger.close()}", markup=False, soft_wrap=True)
                sink.close()
                await rewards.close()
                await engine.close()
                await EnginePool(examiner).close()
                await teachers.close()
                for ranks in self.trained(trainer).values():
                    await ranks.close()

    def _controller(
        self,
        trainer: RayTrainer,
        teachers: Teachers | None,
        source: PromptSource,
        began: tuple[Path, RunState] | None,
        **more: Any,
    ) -> Controller:
        c = self.config
        loop = self._loop_parts(source, rollout=more.pop("rollout"), abort=more.pop("abort"))
        if began is not None:
            loop.restore(began[1])
        experience = Experience(
            algorithm=self.algorithm,
            pack=lambda groups, advantages: [pack(groups, advantages, **self.rows(trainer.dp_size))],
            pack_steps=partial(self._pack, trainer.dp_size),
            trainer=trainer,
            critic=self.critic_ranks,
            mask=partial(mask_truncated, steps=c.train.steps_per_rollout) if c.algorithm.mask_truncated else list,
            teachers=teachers,
        )
        return Controller(
            trainer=trainer,
            algorithm=self.algorithm,
            buffer=loop.buffer,
            producer=loop.producer,
            ledger=loop.ledger,
            snapshot=loop.snapshot,
            observe=source.observe,
            pack=partial(self._pack, trainer.dp_size),
            deal=self._deal,
            describe=self._describe,
            keep=lambda step, groups: write_rollouts(self.run_dir / "rollouts" / f"step_{step}.jsonl", groups),
            save=lambda step, state: self.save(trainer, step, state.parts, state.groups),
            finish_save=partial(self.finish_save, trainer),
            eval_every=c.eval.every,
            save_every=c.checkpoint.every,
            stop=self.stop,
            deadline=self.deadline,
            speed=self.speed,
            experience=experience,
            learn=experience.learn,
            **more,
        )

    def _loop_parts(self, source: PromptSource, *, rollout: Rollout, abort: Callable[[], Awaitable[None]]) -> LoopState:
        c = self.config
        ledger = Ledger(self.run_dir / LEDGER)
        assert ledger.file is not None
        self.files[LEDGER] = ledger.file
        buffer = DataBuffer(
            max_staleness=c.buffer.max_staleness,
            samples=c.train.samples_per_group,
            ledger=ledger,
            backfill=c.under_way_at_publication,
            old_tokens=mask_old if c.buffer.old_tokens == "mask" else None,
        )
        overlong = make_overlong(c.algorithm, c.rollout.longest_answer)
        producer = Producer(
            groups=c.train.groups_per_step,
            steps=c.train.steps,
            buffer=buffer,
            next_prompts=source.take,
            rollout=rollout,
            abort=abort,
            lockstep=c.in_lockstep,
            over_sampling=c.buffer.over_sampling,
            refuse=make_filter(c.algorithm.filter),
            shape=(lambda group: group) if overlong is None else (lambda group: overlong([group])[0]),
            max_rounds=c.rollout.max_rounds,
        )
        return LoopState(source=source, buffer=buffer, producer=producer, ledger=ledger, kept=self.kept)

    def _checks(self, trainer: RayTrainer, clients: Sequence[SGLangClient], source: PromptSource) -> RunChecks:
        c = self.config
        return RunChecks(
            clients=clients,
            comparison=self.comparison(trainer, ()),
            prompts=source.all(),
            check_prompts=c.mismatch.check_prompts,
            check_every=c.mismatch.check_every,
            checksums_every=c.mismatch.checksums_every,
            seed=c.seed,
            idle=not c.under_way_at_publication,
            console=self.console,
        )

    async def _begin(
        self, trainer: RayTrainer, began: tuple[Path, RunState] | None
    ) -> tuple[int, PublishReport | None]:
        """The first step, and what was published; the servers then hold what the trainer computes with."""
        if began is None:
            # codes that another quantizer wrote are not those that this one makes of their values
            return 0, await trainer.publish(version=0) if self.config.precision.qat else None
        folder, state = began
        await self.load(trainer, folder, state)
        return state.step, await trainer.publish(version=state.step)

    # what the loop calls

    async def _rollout(
        self, engine: RolloutEngine, reward: RewardFn, wave: int, prompts: Sequence[Prompt]
    ) -> AsyncGenerator[tuple[int, SampleGroup], None]:
        params = self.sampling(wave)
        assert params.sampling_seed is not None
        groups = groups_as_they_end(
            engine,
            prompts,
            reward,
            n=self.config.train.samples_per_group,
            params=params,
            resumes=self.resumes,
            apart=self.config.groups_end_by_themselves,
        )
        given_up = Counter[str]()
        try:
            async with contextlib.aclosing(groups):
                async for place, group in groups:
                    given_up += Counter(group.discarded)
                    self.kept.forget(params.sampling_seed, group.prompt.id)  # no checkpoint is to hold it twice
                    yield place, group
        finally:
            for p in prompts:
                self.kept.forget(params.sampling_seed, p.id)
            for reason, n in given_up.most_common():
                self.console.print(f"wave {wave}: {n} samples given up: {reason}", markup=False, soft_wrap=True)

    def _pack(
        self, dp_size: int, groups: Sequence[SampleGroup], advantages: Sequence[Sequence[float]]
    ) -> Sequence[TrainBatch]:
        c = self.config
        return pack_steps(
            groups,
            advantages,
            steps=c.train.steps_per_rollout,
            cost=self.cost,
            replayed=c.replay.mode == "r3",
            aggregation=self.algorithm.aggregation,
            constant=c.algorithm.constant(c.rollout.longest_answer),
            **self.rows(dp_size),
        )

    def _deal(self, step: int, advantages: list[list[float]]) -> list[list[float]]:
        if not self.config.algorithm.shuffle_advantages:
            return advantages
        return shuffle_over_batch(advantages, seed=seed_of(self.config.seed, f"shuffle {step}"))

    def _describe(self, step: int, groups: Sequence[SampleGroup]) -> dict[str, float]:
        metrics = rollout_metrics(groups, version=step)
        if self.config.rollout.played:
            metrics |= turn_metrics(groups)
        self.tokens_total += sum(s.response_len for g in groups for s in g.samples)
        return metrics | {"tokens_total": float(self.tokens_total)}

    async def _evaluate(
        self, clients: Sequence[SGLangClient], held: Sequence[HeldOut], version: int
    ) -> dict[str, float]:
        c = self.config
        params = replace(self.sampling(version), sampling_seed=seed_of(c.seed, f"eval {version}"))
        how = {"version": version, "alone": not c.under_way_at_publication, "play": self.play}
        return await evaluate(clients, held, params=params, **how)

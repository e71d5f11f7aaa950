"""One training run: starts servers and trainer ranks, reads prompts and rewards, runs the loop and writes the
report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console

from miles_like.alerts.watch import Watch
from miles_like.algorithms.filters import make_filter
from miles_like.algorithms.registry import make_bounds
from miles_like.algorithms.truncation import make_overlong
from miles_like.alignment.allowance import of_steps
from miles_like.alignment.server_checks import RunChecks
from miles_like.batch.packer import Packer
from miles_like.checkpoint.run_state import group_files
from miles_like.cluster.rollout_servers import RayServers
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.cluster.workers.pool import RolloutWorkers
from miles_like.cluster.workers.values import HeldValues
from miles_like.experience.experience import Experience, OwnValues, Scorer, TokenValues
from miles_like.experience.held_teachers import HeldTeachers
from miles_like.experience.teachers import Teachers
from miles_like.loop.buffer import DataBuffer
from miles_like.loop.controller import Controller
from miles_like.loop.evaluation import Evaluator
from miles_like.loop.feed import Feed
from miles_like.loop.overlapped import OverlappedController, loop_of
from miles_like.loop.producer import Producer
from miles_like.loop.recorder import InThisProcess, Recorder
from miles_like.loop.saver import Saver
from miles_like.loop.state import KNOWN_ANSWER, LoopState
from miles_like.loop.step_bounds import StepBounds
from miles_like.protocols import Algorithm, GroupFilter, RolloutEngine, TrainerRanks
from miles_like.report.console import note
from miles_like.report.health import repeated
from miles_like.report.progress import PhaseBar
from miles_like.run.alignment import check_bits, server_checks
from miles_like.run.rebuild.ranks import RunRanks, start_ranks
from miles_like.run.rebuild.servers import RunWithServers
from miles_like.run.setup.delivery import DirectoryDelivery, TrainerPublication, publication_of
from miles_like.run.setup.fleet import LifeUsers, RunningServers
from miles_like.run.setup.launcher import Launcher, freeze_gc, ready
from miles_like.run.setup.model_plan import ModelPlan, run_algorithm
from miles_like.run.setup.prompts import Prompts, read_prompts
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.run.setup.sampler import EngineSampler, answering
from miles_like.run.setup.teachers import RunTeachers, run_teachers
from miles_like.run.setup.trainer_side import Resumed, RunFiles, packer, speed_meter, trainer_logprobs
from miles_like.run.setup.turn_taking import TurnTaking, release_servers, released
from miles_like.run.setup.worker_side import tokens_of
from miles_like.run.watched.orders import GoingBack, watching_phases
from miles_like.run.watched.watching import run_watch, webhook_of
from miles_like.stopping import Deadline, StopRequest, run_began, run_to_end
from miles_like.turns.users import TurnAnswers, TurnFeed
from miles_like.types import GREEDY, PublishReport, SampleGroup
from rollout.episodes.partial import PartialRollouts
from rollout.episodes.pool import EnginePool
from rollout.episodes.runner import EpisodeRunner
from rollout.episodes.serving import Serving
from rollout.sglang.client import ServerClient
from rollout.vllm_command import OPEN


def train(
    plan: ModelPlan,
    console: Console,
    *,
    resume: bool,
    launcher: Launcher | None = None,
    controller: type[Controller] = Controller,
) -> None:
    """Runs the steps of the configuration, from the latest checkpoint with `resume`, and writes the report.

    controller: the class of the loop; a subclass of Controller changes its steps. Raises ValueError before a process is
    started where the configuration does not fit, RuntimeError where a process fails, Stopped on a stop request.
    """
    (launcher := launcher or Launcher()).check(plan)
    controller = loop_of(controller, during_training=plan.config.publish.during_training)
    webhook_of(plan.config.alerts)  # raises where its variable is not set
    rollout, algorithm = RolloutSide(plan=plan), run_algorithm(plan.config)
    runner = rollout.episode_runner()
    prompts, files = read_prompts(plan, console), RunFiles(plan, console)
    resumed = files.resume() if resume else None
    files.begin()
    if plan.config.trace.on:
        files.traces.ask(launcher.clocks(plan))
    teachers = run_teachers(rollout, console, partial(launcher.nodes, plan))
    teachers.prepare()
    started, say = time.perf_counter(), partial(note, console)
    with contextlib.ExitStack() as stopping:
        stopping.callback(files.close)
        stopping.callback(teachers.stop)  # first, so also where the run's own servers cannot be started
        teachers.launch()
        servers = _servers(launcher, rollout, resumed, say)
        stopping.callback(servers.stop)
        with servers.naming_failures(), teachers.naming_failures():
            if plan.config.takes_turns:  # before the trainer is built, which needs the memory
                run_to_end(release_servers(rollout, servers.wait(say)))
                say(released(plan.config))
            ranks = start_ranks(launcher, plan, algorithm.loss)
            urls = servers.wait(say)
        teachers.wait(say)
        say(ready(plan, len(urls), time.perf_counter() - started, critic=ranks.critic is not None))
        c = plan.config.train
        for sentence in repeated(len(prompts.source), steps=c.steps, groups=c.groups_per_step):
            say(sentence)
        run = TrainingRun(
            rollout=rollout,
            servers=servers,
            algorithm=algorithm,
            runner=runner,
            prompts=prompts,
            files=files,
            resumed=resumed,
            teachers=teachers,
            **ranks._asdict(),
            console=console,
            launcher=launcher,
            controller=controller,
        )
        with servers.naming_failures(), teachers.naming_failures():
            run_to_end(run.with_servers(urls), run.stop, plan.config.checkpoint.grace_s)
    files.end()


def _servers(
    launcher: Launcher, rollout: RolloutSide, resumed: Resumed | None, say: Callable[[str], None]
) -> RayServers:
    """Begins to start the rollout servers. Those without authentication are reported before they listen."""
    if rollout.plan.config.rollout.engine == "vllm":
        say(OPEN)
    return launcher.servers(rollout, resumed.state.weight_version if resumed else 0)


class TrainingRun(RunWithServers):
    """A run whose processes are up: composes the objects of the loop, and closes them."""

    prompts: Prompts

    def __init__(
        self,
        *,
        rollout: RolloutSide,
        servers: RunningServers,
        algorithm: Algorithm,
        runner: EpisodeRunner,
        prompts: Prompts,
        files: RunFiles,
        resumed: Resumed | None,
        teachers: RunTeachers,
        trainer: RayTrainer,
        critic: RayTrainer | None,
        reference: RayTrainer | None = None,
        console: Console,
        launcher: Launcher,
        controller: type[Controller] = Controller,
    ) -> None:
        self.launcher = launcher
        self.rollout, self.algorithm, self.prompts, self.files = rollout, algorithm, prompts, files
        self.servers, self.runner = servers, runner
        self.resumed, self.teachers, self.console = resumed, teachers, console
        self.publication: TrainerPublication | DirectoryDelivery  # `run` makes it
        self.controller = controller
        self.stop = StopRequest()
        self.deadline = Deadline(self.stop, rollout.plan.config.checkpoint.deadline_s, began=run_began())
        self.attach(RunRanks(trainer, critic, reference))

    def attach(self, ranks: RunRanks) -> None:
        """Begins a life with these ranks."""
        self.plan, self.config = self.rollout.plan, self.rollout.plan.config
        critic = {} if ranks.critic is None else {"critic": ranks.critic}
        self._ranks, self.reference = {"trainer": ranks.trainer} | critic, ranks.reference
        self.models: Mapping[str, TrainerRanks] = self._ranks
        self._taking: TurnTaking | None = None
        self._leaves_ranks = False  # to the life that follows
        self.values: TokenValues = OwnValues()

    @property
    def trainer(self) -> TrainerRanks:
        return self.models["trainer"]

    @property
    def serving(self) -> Serving | None:
        """Which servers get requests; None: all."""
        return None if self.fleet is None else self.fleet.serving

    async def run(self) -> None:
        """Checks that the servers agree with the trainer, then runs the loop to its end and closes everything.

        Raises ValueError where they differ by more than the precision explains; otherwise as `Controller.run`.
        """
        c, urls, serving = self.config, [*self.urls.values()], self.serving
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(self._end_ranks)
            clients = [self.rollout.client(url) for url in urls]
            pool = EnginePool(clients, serving)
            # the state of a user's generate function is not saved: it begins again after a resume
            unfinished = PartialRollouts(pool, keep_groups=not c.rollout.plays_itself)
            engine = answering(self.runner, unfinished, self.algorithm, self.prompts.calls)
            closing.push_async_callback(engine.close)
            if (workers := await self.workers()) is not None:
                closing.push_async_callback(workers.close)
            if c.takes_turns:
                self._taking = TurnTaking(self.rollout, urls, self._ranks, workers or unfinished)
                closing.push_async_callback(self._taking.close)
                self.models = self._taking.models
                await self._taking.start()
            await check_bits(self.rollout, self.trainer, clients, serving)
            turns = None if self._taking is None else self._taking.turns
            checked = clients if turns is None else [self.rollout.client(url, turns=turns) for url in urls]
            eval_clients = [self.rollout.client(url, routing=False, turns=turns) for url in urls]
            closing.push_async_callback(lambda: EnginePool([*eval_clients, *checked]).close())  # also of added servers
            self.publication = publication_of(
                self.rollout, self.trainer, urls, goes_on=self.fleet is not None, life=self.life
            )
            packs = packer(self.plan, self.trainer.dp_size, replayed=False, balanced=True)
            teachers = self.teachers.teachers(self.trainer, eval_clients, packs, self.prompts.source.all(), serving)
            closing.push_async_callback(teachers.close)
            await teachers.start()  # before a publication: some are loaded by the trainer, which may sleep afterwards
            checks = self.checks(checked)
            if self.fleet is not None:
                told = None if workers is None else workers.serve
                users = LifeUsers(self.rollout, self.publication, checks, pool, (clients, eval_clients), told)
                self.fleet.attach(users, urls)
                closing.push_async_callback(self.fleet.detach)
            sampler = workers or self.sampler(engine, unfinished, teachers)
            await self.steps(sampler, workers or unfinished, checks, self.teaching(teachers), eval_clients)

    async def steps(
        self,
        sampler: EngineSampler | RolloutWorkers,
        partial: PartialRollouts | RolloutWorkers,
        checks: RunChecks,
        teaching: Scorer | None,
        eval_clients: Sequence[ServerClient],
    ) -> None:
        """Publishes the weights with which the run begins, checks the servers, and runs the loop to its end."""
        c, turns = self.config, None if self._taking is None else self._taking.turns
        workers = sampler if isinstance(sampler, RolloutWorkers) else None
        first, published = await self.publish_first(checks)
        await checks.at_start(first, published)
        with PhaseBar(c.train.steps, self.console) as progress:
            evaluator = Evaluator(
                engines=eval_clients,
                sets=self.prompts.held_out,
                params=self.rollout.sampling(0),
                seed=c.seed,
                alone=not c.in_flight_at_publication,
                every=c.eval.every,
                progress=progress,
                runner=self.runner,
                serving=self.serving,
                history=self.files.evaluations(),
                workers=workers if turns is None or workers is None else TurnAnswers(workers, turns),
            )
            watch = self.watch()
            loop = self.compose(sampler, partial, evaluator, checks, teaching, first, watch)
            freeze_gc()
            self.go_on(loop.recorder, first)
            try:
                async with watching_phases(watch, progress):
                    await loop.run(first=first, steps=c.train.steps, resumed=self.resumed is not None)
                if loop.feed.producer.ended and (loop.saver.checkpoints.saved or 0) < c.train.steps:
                    self.say(f"All prompts are used: data.epochs = {c.data.epochs}")
            except BaseException as e:
                self.files.ends, self._leaves_ranks = not self.goes_on(e), isinstance(e, GoingBack)
                raise
            finally:
                self.deadline.close()
                summary = loop.recorder.ledger.close()
                if self.files.ends:
                    self.say(summary)
                loop.recorder.sink.close()

    async def _end_ranks(self) -> None:
        if not self._leaves_ranks:
            await self.end_ranks()

    async def publish_first(self, checks: RunChecks) -> tuple[int, PublishReport | None]:
        """(number of the first step, the report of the publication before it). A resumed run loads its checkpoint and
        publishes it; a new run publishes only with `precision.qat`, or to servers that have released their weights,
        else None. Trainer and servers then compute with the same weights."""
        if self.resumed is not None:
            await self.resumed.load(self.models)
            step = self.resumed.state.step
            await checks.before_publication()
            return step, await self.publication.publish(step)
        # codes written by another quantizer may differ from those that this quantizer gives for the same values
        # after a loss the servers have weights that are not trained yet
        first = self.config.precision.qat or self.config.takes_turns or self.life > 0
        await checks.before_publication()
        return 0, await self.publication.publish(0) if first else None

    async def workers(self) -> RolloutWorkers | None:
        """The rollout workers, with the groups of the checkpoint if the run resumes; None: this process samples."""
        c, goes_on = self.config, self.fleet is not None
        start = self.launcher.workers(self.rollout, self.urls, self.teachers.places, goes_on=goes_on)
        if start is None:
            return None
        workers = RolloutWorkers(start=start, tokens=tokens_of(c), say=self.say, bound=c.rollout.held_bytes)
        await workers.begin()
        if self.resumed is not None:
            state = self.resumed.state
            groups = await workers.take_over(group_files(self.resumed.folder, state.parts))
            self.resumed = self.resumed._replace(state=replace(state, groups=groups))
        self.values = values = HeldValues(workers)
        for ranks in (*self._ranks.values(), self.reference):
            if ranks is not None:
                ranks.columns = values
        return workers

    def checks(self, clients: Sequence[ServerClient]) -> RunChecks:
        prompts = self.prompts.source.all()
        checks = server_checks(
            self.rollout, self.trainer, clients, prompts, self.console, self.publication.publish, self.fleet
        )
        saved = None if self.resumed is None else self.resumed.state.parts.get(KNOWN_ANSWER)
        if checks.known is not None and saved is not None:
            checks.known.restore(saved)
        return checks

    def compose(
        self,
        sampler: EngineSampler | RolloutWorkers,
        partial: PartialRollouts | RolloutWorkers,
        evaluator: Evaluator,
        checks: RunChecks,
        teachers: Scorer | None,
        first: int,
        watch: Watch,
    ) -> Controller:
        """The loop, restored to the state of the checkpoint if the run resumes from one."""
        c, progress = self.config, evaluator.progress
        recorder = Recorder(
            sink=self.files.sink(first, watch),
            greedy=GREEDY in self.algorithm.needs,
            ledger=self.files.ledger(),
            progress=progress,
            bounds=StepBounds(
                bounds=of_steps(make_bounds(c.mismatch), exact=c.exact_steps),
                on_breach=c.mismatch.on_breach,
                console=self.console,
            ),
            speed=speed_meter(self.plan),
            samples=self.plan.run_dir / "rollouts",
            fence=self.plan.fence,
            curriculum=self.prompts.source,
            episodes=c.rollout.has_episode_runner,
            turns=None if self._taking is None else self._taking.turns,
            earlier_s=self.files.earlier_s,
            store=sampler if isinstance(sampler, RolloutWorkers) else InThisProcess(self.prompts.rewards.log),
        )
        feed = self.feed(sampler, recorder)
        state = LoopState(source=self.prompts.source, feed=feed, recorder=recorder, partial=partial, known=checks.known)
        if self.resumed is not None:
            state.restore(self.resumed.state)
        packs = self.packer()
        return self.make_controller(
            feed=feed,
            experience=self.experience(packs, teachers),
            packer=packs,
            trainer=self.trainer,
            checks=checks,
            recorder=recorder,
            evaluator=evaluator,
            saver=Saver(
                state=state,
                checkpoints=self.files.checkpoints(self.models, self.resumed),
                stop=self.stop,
                deadline=self.deadline,
                progress=progress,
                every=c.checkpoint.every,
                models_first=self._taking is not None,
                orders=self.orders,
            ),
        )

    def watch(self) -> Watch:
        """The alerts of this life, in their state after the rows before it; what they order is in `orders`."""
        made = run_watch(self.files, self.stop, self.console)
        self.orders = made.orders
        return made.watch

    def teaching(self, teachers: Teachers) -> Scorer | None:
        """What scores the groups of a step; None without teachers."""
        c, values = self.config, self.values
        if c.distillation.teaching is None or not isinstance(values, HeldValues):
            return teachers if c.distillation.teaching else None
        turned = self._taking is not None and c.distillation.policy_teachers
        serving = self._taking.turns.serving if self._taking is not None and turned else contextlib.nullcontext
        return HeldTeachers(own=teachers, values=values, at_once=c.alignment.deterministic, serving=serving)

    def experience(self, packs: Packer, teachers: Scorer | None) -> Experience:
        c = self.config
        held = self.values if isinstance(self.values, HeldValues) else None
        return Experience(
            algorithm=self.algorithm,
            packer=packs,
            trainer=self.trainer,
            critic=self.models.get("critic"),
            reference=self.reference,
            teachers=teachers,
            values=self.values,
            mask_truncated=c.algorithm.parts.mask_truncated,
            shuffle_seed=c.seed if c.algorithm.parts.shuffle_advantages else None,
            trainer_logprobs=trainer_logprobs(self.plan, self.trainer, packs, held),
        )

    @property
    def make_controller(self) -> Callable[..., Controller]:
        if isinstance(self.publication, DirectoryDelivery):
            assert issubclass(self.controller, OverlappedController), "chosen by `loop_of`"
            return partial(self.controller, delivery=self.publication)
        return self.controller

    def packer(self) -> Packer:
        """How the groups of a step become a batch for each optimizer step."""
        c = self.config
        return packer(
            self.plan,
            self.trainer.dp_size,
            replayed=c.replay.mode == "r3",
            balanced=True,
            aggregation=self.algorithm.aggregation,
            constant=c.algorithm.parts.constant(c.rollout.longest_answer),
            steps=c.train.steps_per_rollout,
        )

    def sampler(self, engine: RolloutEngine, partial: PartialRollouts, teachers: Teachers) -> EngineSampler:
        """Samples in this process."""
        kept = self.kept

        def complete(group: SampleGroup) -> None:
            if self.config.distillation.teaching is not None and kept(group) is None:
                teachers.begin(group)

        return EngineSampler(
            rollout=self.rollout,
            engine=engine,
            partial=partial,
            reward=self.prompts.rewards(None),
            console=self.console,
            complete=complete,
        )

    @property
    def kept(self) -> GroupFilter:
        return make_filter(self.config.algorithm.parts.filter, greedy=GREEDY in self.algorithm.needs)

    def feed(self, sampler: EngineSampler | RolloutWorkers, recorder: Recorder) -> Feed:
        c = self.config
        buffer = DataBuffer(
            max_staleness=c.buffer.max_staleness,
            samples=c.train.samples_per_group,
            ledger=recorder.ledger,
            backfill=c.in_flight_at_publication,
            mask_old_tokens=c.buffer.old_tokens == "mask",
            release=recorder.store.release,
        )
        producer = Producer(
            groups=c.train.groups_per_step,
            steps=c.train.steps,
            buffer=buffer,
            source=self.prompts.source,
            sampler=sampler,
            filter=self.kept,
            overlong=make_overlong(c.algorithm.parts.overlong, c.rollout.longest_answer),
            lockstep=c.in_lockstep,
            over_sampling=c.buffer.over_sampling,
            max_rounds=c.rollout.max_rounds,
            capacity=sampler if isinstance(sampler, RolloutWorkers) else None,
        )
        parts: dict[str, Any] = {"buffer": buffer, "producer": producer, "stop": self.stop}
        if self._taking is None:
            feed = Feed(**parts, progress=recorder.progress)
        else:
            feed = TurnFeed(**parts, progress=recorder.progress, turns=self._taking.turns)
            self._taking.sampling.feed = feed
        if isinstance(sampler, RolloutWorkers):
            sampler.lost = feed.lose_of
        return feed

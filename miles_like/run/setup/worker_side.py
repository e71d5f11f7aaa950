"""The rollout workers of a run: which servers each has, and what it samples with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from miles_like import spans
from miles_like.algorithms.filters import make_filter
from miles_like.cluster.placement import PlacementPlan, Slot
from miles_like.cluster.run_nodes import RunNodes
from miles_like.cluster.workers.worker import RewardOfRounds, Sampling
from miles_like.config.run import RunConfig
from miles_like.config.sections.reward import RewardConfig
from miles_like.experience.teachers import Teachers
from miles_like.experience.token_work import TokenWork
from miles_like.plugins import GIVEN
from miles_like.report.reward_calls import RewardTally
from miles_like.report.traces.writer import parts_of
from miles_like.rewards.load import OUTAGE_S, Rewards
from miles_like.run.setup.model_plan import ModelPlan, model_plan, run_algorithm
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.run.setup.sampler import EngineSampler, answering
from miles_like.run.setup.teachers import TeacherPlaces, run_teachers
from miles_like.types import GREEDY, Prompt, SampleGroup, SamplingParams, Unit
from rollout.episodes.groups import run_groups
from rollout.episodes.partial import PartialRollouts
from rollout.episodes.pool import EnginePool
from rollout.episodes.serving import Serving
from rollout.server_key import ServerKey
from rollout.sglang.client import ServerClient


def workers_of(plan: ModelPlan) -> int:
    """The number of rollout workers of a run; 0: the driver samples."""
    c = plan.config
    if c.rollout.workers is not None or c.cluster.nodes == 1:
        return c.rollout.workers or 0
    if rewards_need_driver(c.reward):
        return 0
    return len({slot.node for slot in plan.placement.of("rollout")})


def rewards_need_driver(reward: RewardConfig) -> bool:
    """Whether the rewards are functions that the driver alone has."""
    return any(name.startswith(GIVEN) for name in reward.weights)


def shares_of(nodes: Sequence[int], workers: int) -> list[list[int]]:
    """The servers of each worker, by their places in `nodes`, the node of each. With as many workers as nodes each has
    those of a node; otherwise as many for each, neighbours first. Where there are fewer servers than workers, some
    workers have the same one."""
    order = sorted(range(len(nodes)), key=lambda s: (nodes[s], s))
    if workers > len(nodes):
        return [[order[w % len(order)]] for w in range(workers)]
    if workers == len(set(nodes)):
        return [[s for s in order if nodes[s] == node] for node in sorted(set(nodes))]
    ends = [round(len(nodes) * w / workers) for w in range(workers + 1)]
    return [order[a:b] for a, b in pairwise(ends)]


def worker_slots(placement: PlacementPlan, workers: int) -> list[tuple[Slot, list[int]]]:
    """Where each worker is, on the node of its first server and without a GPU; and its servers, by their numbers."""
    heads = [slot for slot in placement.of("rollout") if slot.node_rank == 0]
    shares = [[heads[i] for i in own] for own in shares_of([slot.node for slot in heads], workers)]
    return [
        (Slot(role="rollout", index=w, node=own[0].node, gpus=()), [slot.index for slot in own])
        for w, own in enumerate(shares)
    ]


def tokens_of(config: RunConfig) -> Callable[[Prompt], int]:
    """The most tokens that the samples of a prompt have together."""
    n, longest = config.train.samples_per_group, config.rollout.longest_answer
    return lambda prompt: n * (len(prompt.token_ids) + longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecipe:
    """Makes what a worker samples with, in its process. key: of the servers. goes_on: requests of a server that does
    not answer go to others. everywhere: URLs of all servers of the run; teachers: where their servers are."""

    config: RunConfig
    run_dir: Path
    served: Path
    weights: Path
    key: ServerKey
    goes_on: bool
    everywhere: Sequence[str]
    teachers: TeacherPlaces

    def __call__(self, urls: Sequence[str]) -> Sampling:
        """Raises ValueError for a reward, filter or environment that cannot be loaded."""
        if self.config.trace.on and not spans.on():
            spans.begin(parts_of(self.run_dir), "rollout_worker")
        plan = model_plan(self.config, self.run_dir, self.served, self.weights)
        rollout, calls = RolloutSide(plan=plan, key=self.key), RewardTally()
        rewards = Rewards(self.config.reward, sandbox=self.config.sandbox, outage_s=OUTAGE_S, log=calls)
        # where the run goes on without some servers, a worker whose own ones are gone asks others
        serving, of_run = None, list(urls)
        if self.goes_on:
            serving = Serving(self.everywhere, limit_s=self.config.cluster.timeout_s)
            of_run = list(self.everywhere)
        pool = EnginePool([rollout.client(url) for url in of_run], serving, near=urls)
        partial = PartialRollouts(pool, keep_groups=not self.config.rollout.plays_itself)
        runner, algorithm = rollout.episode_runner(), run_algorithm(self.config)
        engine = answering(runner, partial, algorithm, calls)
        answered = EnginePool([rollout.client(url, routing=False) for url in of_run], serving, near=urls)
        asked = runner.wrap(answered)

        async def answer(
            reward: str | None, prompts: Sequence[Prompt], *, n: int, params: SamplingParams
        ) -> Sequence[SampleGroup]:
            return await run_groups(asked, prompts, rewards(reward), n=n, params=params)

        reward = rewards(None)
        together = RewardOfRounds(reward) if reward.unit is Unit.BATCH else reward
        everywhere = [rollout.client(url, routing=False) for url in self.everywhere]
        teachers = self._teachers(rollout, everywhere, serving)
        known = set(self.everywhere)

        def serve(urls: Collection[str]) -> None:
            for url in set(urls) - known:
                known.add(url)
                pool.add(rollout.client(url))
                answered.add(rollout.client(url, routing=False))
                everywhere.append(rollout.client(url, routing=False))
            if serving is not None:
                serving.serve(urls)

        async def close() -> None:
            for one in (rewards, engine, asked, teachers, *everywhere):
                if one is not None:
                    await one.close()

        return Sampling(
            sampler=EngineSampler(rollout=rollout, engine=engine, partial=partial, reward=together, console=Console()),
            partial=partial,
            serve=serve,
            filter=make_filter(self.config.algorithm.parts.filter, greedy=GREEDY in algorithm.needs),
            answer=answer,
            work=TokenWork(algorithm=algorithm, teachers=teachers),
            rewards=calls,
            reward=reward,
            close=close,
        )

    def _teachers(
        self, rollout: RolloutSide, clients: Sequence[ServerClient], serving: Serving | None
    ) -> Teachers | None:
        if self.config.distillation.teaching is None:
            return None
        return run_teachers(rollout, Console(), _no_nodes).of_worker(self.teachers, clients, serving)


def _no_nodes() -> RunNodes:
    raise RuntimeError("a rollout worker starts no teacher")


def worker_recipe(rollout: RolloutSide, urls: Sequence[str], teachers: TeacherPlaces, *, goes_on: bool) -> WorkerRecipe:
    """urls: of all servers; teachers, goes_on: as in WorkerRecipe."""
    plan = rollout.plan
    return WorkerRecipe(
        config=plan.config,
        run_dir=plan.run_dir.resolve(),
        served=plan.served.resolve(),
        weights=plan.weights.resolve(),
        key=rollout.key,
        goes_on=goes_on,
        everywhere=urls,
        teachers=teachers,
    )

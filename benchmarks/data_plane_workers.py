"""The part of data_plane.py with rollout workers: the driver's processor time of a sample, what workers take in, and
the memory that a sample needs there.

Workers are real actors with the client of data_plane.py, the driver does what a step of the loop does with groups:
receives their records, plans a batch of two rows for two pipeline stages each, has the workers cut what every place
needs, and frees the groups. Rewards and the trainer are left out, and the ranks, unless a
process stands for them. The driver's time is that of the thread that does this; Ray's own threads in its process work
by the second, not by the sample, and have a figure of their process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
import torch

from miles_like.batch.packer import Packer
from miles_like.batch.parcel import Parcel
from miles_like.batch.portion import Portion, filled
from miles_like.cluster.placement import Slot
from miles_like.cluster.run_nodes import RunNodes
from miles_like.cluster.workers.actors import StartActor
from miles_like.cluster.workers.pool import RolloutWorkers
from miles_like.cluster.workers.values import HeldValues
from miles_like.cluster.workers.worker import Sampling
from miles_like.config.sections.cluster import ClusterConfig
from miles_like.nodes.reservation import reserve
from miles_like.records import PlannedBatch, PlannedMicroBatch
from miles_like.types import Prompt, SampleGroup, SamplingParams
from rollout.sglang.client import SGLangClient
from rollout.sglang.samples import RoutingShape
from routing_replay.agreement import RouteCounts, count_routes
from routing_replay.align import ShardSpec
from routing_replay.rank_routes import RankRoutes

G = 4  # samples a group


@dataclass(frozen=True)
class Replayed:
    """What a worker samples with: every sample is the server's one reply. every_s: the least time of a sample."""

    shape: RoutingShape
    vocabulary: int
    tokens: int
    every_s: float = 0.0

    def __call__(self, urls: Sequence[str]) -> Sampling:
        client = SGLangClient(
            urls[0], routing=self.shape, vocabulary=self.vocabulary, request_timeout_s=600.0, samples_from="client"
        )
        sampler: Any = _Sampler(client, SamplingParams(max_new_tokens=self.tokens), self.every_s)
        return Sampling(
            sampler=sampler,
            partial=sampler,
            serve=lambda urls: None,
            filter=lambda group: None,
            answer=sampler,
            work=sampler,
            close=client.close,
        )


@dataclass(frozen=True)
class _Sampler:
    client: SGLangClient
    params: SamplingParams
    every_s: float

    async def groups(
        self, round_index: int, prompts: Sequence[Prompt]
    ) -> AsyncGenerator[tuple[int, SampleGroup], None]:
        for place, prompt in enumerate(prompts):
            due = time.perf_counter() + G * self.every_s
            made = [(await self.client.generate([prompt], n=1, params=self.params))[0] for _ in range(G)]
            samples = tuple(replace(g.samples[0], index=i, reward=float(i % 2)) for i, g in enumerate(made))
            await asyncio.sleep(due - time.perf_counter())
            yield place, SampleGroup(prompt=prompt, samples=samples)

    @asynccontextmanager
    async def suspended(self) -> AsyncIterator[None]:
        yield

    def state(self) -> Mapping[str, SampleGroup]:
        return {}


class Rank:
    """Stands for all ranks of a step: fills their micro-batches from what it gets, and compares the routes of each
    layer with others of the same experts, as a forward pass compares them with its routers' choice."""

    def fill(self, cells: Sequence[PlannedMicroBatch], *parts: Parcel[Portion]) -> int:
        compared = 0
        for micro in filled(cells, [part.value for part in parts]):
            assert isinstance(micro.routing, RankRoutes)
            trace = micro.routing.trace
            real = torch.ones(len(trace), dtype=torch.bool)
            for layer in range(len(trace.layers)):
                recorded = trace.experts[:, layer]
                counts, _ = count_routes(recorded.roll(1, 0), recorded, real, trace.num_experts)
                compared += int(RouteCounts(*counts.tolist()).rows)
        return compared


class Measured(NamedTuple):
    """Of one round; all but `iteration_s` of one of its samples."""

    driver_s: float  # processor time of the driver's thread
    worker_s: float  # of the worker that has sampled it, with the threads that are Ray's
    ray_s: float  # of all threads of its process that are Ray's
    wall_s: float  # of all workers together
    iteration_s: float  # by the clock, until the last portion is cut, with a Rank until all micro-batches are filled
    memory: float  # bytes: the largest resident memory of a worker beyond that before, over the samples that it held


def with_workers(
    urls: Sequence[str],
    recipe: Replayed,
    prompt: Sequence[int],
    *,
    groups: Sequence[int],
    logs: Path,
    rank: Any = None,
) -> list[Measured]:
    """A figure for each round, of so many groups; the first is of processes that are cold. Ray is started already.

    rank: a handle of an actor of `Rank`; None: the portions are cut and not used."""
    held = reserve(1, 0, run="data_plane", when_busy="refuse", timeout_s=60, say=print)
    nodes = RunNodes(nodes=held.nodes, facts=held.facts, cluster=ClusterConfig(), local=True)
    slots = [Slot(role="rollout", index=w, node=0, gpus=()) for w in range(len(urls))]
    start = StartActor(nodes=nodes, slots=slots, urls=[[url] for url in urls], factory=recipe, logs=logs)
    workers = RolloutWorkers(start=start, tokens=lambda p: G * recipe.tokens, say=print, bound=1 << 50)
    half = len(recipe.shape.moe_layers) // 2
    parts = [ShardSpec(layers=recipe.shape.moe_layers[:half]), ShardSpec(layers=recipe.shape.moe_layers[half:])]
    packer = Packer(dp_size=2, max_tokens=max(2 * recipe.tokens, 1 << 16))

    async def one(round_index: int, processes: Sequence[psutil.Process]) -> Measured:
        count = groups[round_index]
        prompts = [Prompt(id=f"p{i}", token_ids=tuple(prompt), answer="") for i in range(count)]
        before, worked = [process.memory_info().rss for process in processes], worked_s(processes)
        cpu, own, wall = time.process_time(), time.thread_time(), time.perf_counter()
        found = [group async for _, group in workers.groups(round_index, prompts)]
        seconds, worked = time.perf_counter() - wall, worked_s(processes) - worked
        (batch,) = packer.steps(found, [[1.0] * G] * count)
        assert isinstance(batch, PlannedBatch)
        pulled = await HeldValues(workers).pull(batch, [(row, part) for row in range(2) for part in parts])
        own = time.thread_time() - own
        if rank is not None:
            for (row, _), portions in pulled.portions.items():
                assert await rank.fill.remote(batch.grid[row], *portions)
        iteration = time.perf_counter() - wall
        cpu = time.process_time() - cpu - own
        memory = max(p.memory_info().rss - b for p, b in zip(processes, before, strict=True))
        workers.release(found)
        del pulled
        n = count * G
        return Measured(own / n, worked / n, cpu / n, seconds / n, iteration, memory / (n / len(urls)))

    async def all_rounds() -> list[Measured]:
        await workers.begin()
        pids = [ray.get(w.link.actor.pid.remote()) for w in workers._workers]  # type: ignore[attr-defined]
        out = [await one(i, [psutil.Process(pid) for pid in pids]) for i in range(len(groups))]
        await workers.close()
        return out

    try:
        return asyncio.run(all_rounds())
    finally:
        held.release()


def worked_s(processes: Sequence[psutil.Process]) -> float:
    """Processor time of processes so far."""
    times = [process.cpu_times() for process in processes]
    return float(sum(of.user + of.system for of in times))

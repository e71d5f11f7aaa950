"""Seconds of each phase of one GRPO iteration of configs/tiny.toml, and what R3 costs of it.

Two sides take turns, each with a separate server and trainer, so both see the same machine: R3 on, and no routing at
all, where the server was started without --enable-return-routed-experts and keeps no ids. R3's share is then all of it:
capture, the wire, reading, packing, slicing, shipping and replay, in seconds by the clock and, as `r3_cpu_share`, in
seconds of processor time of all processes of the run, which a busy machine moves less. Goal: publish <= 10 %. R3's
share is held to its goal by benchmarks/r3.py. Before that, the comparison of both sides that a run makes before its
first step, `verify_short_s`. Goal: <= 5 s.

    python benchmarks/iteration.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from figures import add_write, finish
from rich.console import Console
from rich.table import Table

from miles_like.batch.packing import pack
from miles_like.cluster.factories import MegatronFactory
from miles_like.cluster.run_nodes import RunNodes
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.pipeline.stages import plan_stages, run_stages
from miles_like.rewards.load import make_reward
from miles_like.run import assemble
from miles_like.run.alignment import comparison
from miles_like.run.setup.launcher import Launcher, freeze_gc
from miles_like.run.setup.model_plan import model_plan, run_algorithm
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.run.setup.run_cluster import RunCluster
from miles_like.types import SampleGroup
from rollout.episodes.groups import run_groups
from rollout.prompts.mix import PromptSource
from rollout.sglang.client import ServerClient

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("rollout", "train", "publish")
GOALS = {"publish_share_max": 0.10, "verify_short_s_max": 5.0}


class Side:
    """One way of iterating: a client and a trainer."""

    def __init__(self, rollout: RolloutSide, nodes: RunNodes, url: str, *, name: str, routing: bool) -> None:
        plan = rollout.plan
        self.rollout, self.config, self.algorithm = rollout, plan.config, run_algorithm(plan.config)
        self.engine: ServerClient = rollout.client(url, routing=routing)
        self.trainer = RayTrainer(
            MegatronFactory(plan.model.trainer, plan.weights, self.algorithm.loss),
            plan.placement.of("trainer"),
            nodes,
            dp_size=self.config.parallel.dp,
            log_dir=plan.run_dir / f"logs-{name}",
        )
        self.trainer.connect(rollout.publisher([url]))
        self.reward = make_reward(self.config.reward)
        self.compared = 0.0  # seconds, before the first iteration
        self.compared_again = 0.0  # seconds, after the last
        self.processes: Sequence[psutil.Process] = ()  # whose time counts
        self.seconds: dict[str, list[float]] = {name: [] for name in (*PHASES, "iteration", "cpu")}

    async def iterate(self, step: int, source: PromptSource) -> Sequence[SampleGroup]:
        c = self.config.train
        worked = cpu_seconds(self.processes)
        marks = [time.perf_counter()]
        groups = await run_groups(
            self.engine,
            source.take(c.groups_per_step),
            self.reward,
            n=c.samples_per_group,
            params=self.rollout.sampling(step),
        )
        marks.append(time.perf_counter())
        advantages = self.algorithm.advantages(groups)
        await self.trainer.train(
            [pack(groups, advantages, dp_size=self.trainer.dp_size, max_tokens=c.max_tokens_per_rank)]
        )
        marks.append(time.perf_counter())
        await self.trainer.publish(version=step + 1)
        marks.append(time.perf_counter())
        for name, a, b in zip(PHASES, marks, marks[1:], strict=False):
            self.seconds[name].append(b - a)
        self.seconds["iteration"].append(marks[-1] - marks[0])
        self.seconds["cpu"].append(cpu_seconds(self.processes) - worked)
        return groups


async def compare(side: Side, source: PromptSource) -> float:
    """Seconds of the short form of `verify`."""
    n = side.config.mismatch.check_prompts
    began = time.perf_counter()
    report = await comparison(side.rollout, side.trainer, source.all()[:n]).short([side.engine])
    seconds = time.perf_counter() - began
    assert report.ok, report.sentence()
    return seconds


def started() -> list[psutil.Process]:
    """This process and all that it started: ranks, servers and Ray. Listing them takes a good part of an iteration."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def measure(sides: Sequence[Side], source: PromptSource, iterations: int, warm: int) -> None:
    sides[0].compared = await compare(sides[0], source)
    freeze_gc()  # as a run does
    for step in range(warm + iterations):
        for side in sides if step % 2 else reversed(sides):
            await side.iterate(step, source)
        if step + 1 == warm:
            for side in sides:
                side.processes = started()
                side.seconds = {name: [] for name in side.seconds}
    sides[0].compared_again = await compare(sides[0], source)
    for side in sides:
        await side.engine.close()
        await side.trainer.close()


def by_turns(ways: Mapping[str, tuple[RunConfig, bool]], home: Path, iterations: int) -> list[Side]:
    """Iterations of each way, by turns, each on a separate server. ways: name -> configuration, whether with routing;
    all have the first one's checkpoint."""
    console, run_dir = Console(stderr=True), home / "run"
    configs = [config for config, _ in ways.values()]
    cluster = RunCluster(configs[0], run_dir, console, None)
    stages = plan_stages(
        configs[0], run_dir, assemble.stage_functions(configs[0], assemble.known_model(configs[0]), console, cluster)
    )
    run_stages(stages, ("fetch", "dequantize", "convert", "stage"), console, fresh=False)
    data = stages[3].directory / "data"
    launcher = Launcher(cluster)
    made = [RolloutSide(plan=model_plan(config, run_dir, data / "hf", data / "megatron")) for config in configs]
    servers = [launcher.servers(side, 0, routing=way[1]) for side, way in zip(made, ways.values(), strict=True)]
    try:
        sides = [
            Side(rollout, cluster.nodes(), server.wait()[0], name=name, routing=ways[name][1])
            for name, rollout, server in zip(ways, made, servers, strict=True)
        ]
        source = PromptSource(configs[0].data, made[0].plan.tokenizer, configs[0].data.train)
        asyncio.run(measure(sides, source, iterations, warm=3))
    finally:
        for s in servers:
            s.stop()
    return sides


def medians(side: Side) -> dict[str, float]:
    return {f"{name}_s": statistics.median(seconds) for name, seconds in side.seconds.items()}


def run(config: RunConfig, home: Path, iterations: int) -> dict[str, float]:
    off = config.model_copy(update={"replay": config.replay.model_copy(update={"mode": "off"})})
    sides = by_turns({"r3": (config, True), "plain": (off, False)}, home, iterations)
    # paired: each turn's two iterations lie next to each other in time
    share = {
        name: statistics.median(
            (a - b) / whole
            for a, b, whole in zip(x, sides[1].seconds[name], sides[0].seconds["iteration"], strict=True)
        )
        for name, x in sides[0].seconds.items()
    }
    with_r3, without = (sum(side.seconds["cpu"]) for side in sides)  # of a hundredth's resolution: only the sum tells
    figures = medians(sides[0])
    return (
        {"verify_short_s": sides[0].compared}
        | figures
        | {"publish_share": figures["publish_s"] / figures["iteration_s"], "r3_share": share["iteration"]}
        | {"r3_cpu_share": (with_r3 - without) / with_r3}
        | {f"r3_share_in_{name}": share[name] for name in PHASES}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_write(parser)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    config = load_config(ROOT / "configs" / "tiny.toml", ["model.make.max_steps=0"])
    with tempfile.TemporaryDirectory() as home:
        try:
            figures = run(config, Path(home), iterations=8 if quick else 40)
        finally:
            assemble.shut_down()
    table = Table("figure", "value", title="one GRPO iteration, medians")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3f}")
    Console().print(table)
    holds = all(figures[name.removesuffix("_max")] <= goal for name, goal in GOALS.items())
    finish("iteration", figures, GOALS, holds)


if __name__ == "__main__":
    main()

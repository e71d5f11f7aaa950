"""The parts of a training loop, all played by one object that records what happens and when."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import torch
from rich.console import Console

from miles_like.checkpoint.ledger import Ledger
from miles_like.checkpoint.writer import Snapshot
from miles_like.experience.experience import Experience
from miles_like.loop.buffer import DataBuffer
from miles_like.loop.controller import Controller
from miles_like.loop.feed import Feed
from miles_like.loop.producer import Producer
from miles_like.loop.recorder import Recorder
from miles_like.loop.saver import Saver
from miles_like.loop.step_bounds import StepBounds
from miles_like.report.progress import PhaseBar
from miles_like.stopping import Deadline, StopRequest
from miles_like.types import Finish, Prompt, PublishReport, Sample, SampleGroup, StepReport, TrainBatch, VersionSpan


def group(prompt: Prompt, version: int, *, empty: bool = False) -> SampleGroup:
    sample = Sample(
        prompt_id=prompt.id,
        index=0,
        token_ids=torch.tensor([1, 2]),
        loss_mask=torch.tensor([False, not empty]),
        logprobs=torch.zeros(2),
        routing=None,
        versions=(VersionSpan(version, 0, 1),),
        finish=Finish.STOP,
        text="",
        reward=1.0,
    )
    return SampleGroup(prompt=prompt, samples=(sample,))


class World:
    """All parts at once: it records what happens and when."""

    dp_size = 1
    name = "fake"
    loss = None
    needs: frozenset[str] = frozenset()
    steps_per_rollout = 1
    asynchronous = True  # of checkpoints
    held: Sequence[int] = ()  # steps whose checks ask the trainer
    controller: Callable[..., Controller] = Controller

    def __init__(
        self,
        *,
        rollout_s: float = 0.0,
        train_s: float = 0.0,
        fail_at: int | None = None,
        stop_at: int | None = None,
        prompts: int = 10**6,
    ) -> None:
        self.version, self.weights, self.dealt = 0, 0, 0  # of the servers, of the trainer
        self.unfinished: int | None = None
        self.rollout_s, self.train_s, self.fail_at = rollout_s, train_s, fail_at
        self.stop_at, self.prompts = stop_at, prompts
        self.log: list[str] = []
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.staleness: list[int] = []
        self.trained: list[str] = []
        self.steps = 0  # of the optimizer

    def take(self, n: int) -> list[Prompt]:
        first, self.dealt = self.dealt, min(self.dealt + n, self.prompts)
        return [Prompt(id=str(i), token_ids=(1,), answer="") for i in range(first, self.dealt)]

    async def groups(self, wave: int, prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[int, SampleGroup], None]:
        if wave == self.fail_at:
            raise RuntimeError("server http://x cannot be reached")
        version = self.version
        self.log.append(f"rollout {wave} with {version}")
        await asyncio.sleep(self.rollout_s)
        if wave == self.stop_at:
            self.stop.ask("enough", 9)
            await asyncio.sleep(60)
        for i, p in enumerate(prompts):
            yield i, group(p, version)

    async def abort(self) -> None:
        await asyncio.sleep(0.01)
        self.log.append("aborted")

    def advantages(self, groups: Sequence[SampleGroup]) -> list[list[float]]:
        return [[0.0 for _ in g.samples] for g in groups]

    def returns(self, groups: Sequence[SampleGroup]) -> None:
        """There is no critic."""

    def pack(self, groups: Sequence[SampleGroup], advantages: Sequence[Sequence[float]]) -> Sequence[TrainBatch]:
        self.staleness += [self.weights - g.oldest_version for g in groups]
        self.trained += [g.prompt.id for g in groups]
        return ()

    async def train(self, batches: Sequence[TrainBatch]) -> StepReport:
        self.log.append(f"train {self.weights}")
        self.steps += len(batches)
        await asyncio.sleep(self.train_s)
        return StepReport(version=self.weights + 1, metrics={"train/loss": 1.0})

    async def publish(self, *, version: int) -> PublishReport:
        self.version = self.weights = version
        return PublishReport(version=version, bytes=3, seconds=0.0, pause_seconds=0.0)

    async def before_training(self, step: int) -> None:
        """Servers are not checked."""

    async def before_publication(self) -> None:
        """As before."""

    def hold_training(self, step: int) -> bool:
        return step in self.held

    async def published(
        self, step: int, report: PublishReport, *, beside_training: bool = False
    ) -> tuple[PublishReport, Mapping[str, float]]:
        assert report.version == step
        return report, {}

    def due(self, step: int, *, last: bool) -> bool:
        return last or bool(self.eval_every and step % self.eval_every == 0)

    async def figures(self, version: int) -> Mapping[str, float]:
        assert version == self.version
        self.log.append(f"eval {version}")
        return {"eval/x/avg@1": 0.5}

    async def snapshot(self, step: int, whole: bool) -> Snapshot:
        self.ledger.check(self.buffer.group_ids)
        self.ledger.flush(step)
        return Snapshot(parts={"step": step, "whole": whole})

    async def save_models(self, step: int) -> None:
        assert self.unfinished is None
        self.log.append(f"models {step} under {self.version}")

    async def begin(self, step: int, snapshot: Snapshot) -> None:
        assert self.unfinished is None and snapshot.parts["step"] == step
        self.log.append(f"save {step}")
        self.unfinished = step

    async def finish(self, *, wait: bool) -> float | None:
        """A save takes a step longer than the one it began in, unless it is waited for."""
        if self.unfinished is not None and (wait or self.version > self.unfinished):
            self.log.append(f"saved {self.unfinished}")
            self.unfinished = None
            return 0.0
        return None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, metrics))

    def run(
        self,
        steps: int,
        *,
        first: int = 0,
        max_staleness: int = 0,
        eval_every: int = 0,
        save_every: int = 0,
        producer: Mapping[str, Any] = MappingProxyType({}),
        ledger: Path | None = None,
        samples: Path | None = None,
        bounds: StepBounds | None = None,
        experience: type[Experience] = Experience,
        models_first: bool = False,
    ) -> None:
        self.version, self.weights, self.eval_every = first, first, eval_every
        self.stop, self.ledger = StopRequest(), Ledger(ledger)
        backfill = bool(max_staleness) and not producer.get("lockstep")
        self.buffer = DataBuffer(max_staleness=max_staleness, ledger=self.ledger, backfill=backfill)
        made = Producer(groups=2, buffer=self.buffer, source=self, sampler=self, **producer)
        made.version = made._step = first
        progress, fake = PhaseBar(steps, Console(quiet=True)), cast(Any, self)
        packer: Any = SimpleNamespace(steps=self.pack, steps_per_rollout=1)
        controller = self.controller(
            feed=Feed(buffer=self.buffer, producer=made, stop=self.stop, progress=progress),
            experience=experience(algorithm=fake, packer=packer, trainer=fake),
            packer=packer,
            trainer=fake,
            checks=self,
            recorder=Recorder(
                sink=fake,
                ledger=self.ledger,
                progress=progress,
                bounds=bounds or StepBounds(),
                samples=samples,
            ),
            evaluator=fake,
            saver=Saver(
                state=self,
                checkpoints=fake,
                stop=self.stop,
                deadline=Deadline(self.stop, None, began=0.0),
                progress=progress,
                every=save_every,
                models_first=models_first,
            ),
        )
        asyncio.run(asyncio.wait_for(controller.run(first=first, steps=steps, resumed=first > 0), 20))

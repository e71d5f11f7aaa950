"""Law: a run whose samples are aborted goes on, and no sample shows it but by the weights that it says it is of.

Aborts come from anywhere, and with publish.pause_mode = "abort" from each publication. While the weights are the same
an aborted sample is the one that was never aborted. Under new weights what was sampled keeps its tokens, log-probs and
routes, and what follows has those of the new ones; a route on the wrong side of that edge trains an expert for a token
that it did not give. Either way the trainer replays each row.

The embedded engine over HTTP, its publisher, the controller with max_staleness = 1, and a trainer of one rank. Engines
are held in the middle of a rollout until the abort is there, so that no clock decides. Not covered: stock SGLang
(test_recorded_sglang.py reads its answers), Ray, several servers.

Letters: P prompt tokens, S tokens of a sample.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from miles_like.algorithms.registry import make_algorithm
from miles_like.batch.packer import Packer
from miles_like.batch.packing import pack
from miles_like.checkpoint.ledger import Ledger
from miles_like.checkpoint.writer import Snapshot
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.experience.experience import Experience
from miles_like.loop.buffer import DataBuffer
from miles_like.loop.controller import Controller
from miles_like.loop.feed import Feed
from miles_like.loop.producer import Producer
from miles_like.loop.recorder import Recorder, StepRecord
from miles_like.loop.saver import Saver
from miles_like.report.progress import PhaseBar
from miles_like.rewards.load import scored_by
from miles_like.stopping import Deadline, StopRequest
from miles_like.types import (
    Finish,
    Prompt,
    PublishReport,
    Sample,
    SampleGroup,
    SamplingParams,
    StepReport,
    TrainBatch,
    VersionSpan,
)
from rollout.config import PublishConfig
from rollout.episodes.groups import run_groups
from rollout.episodes.pool import EnginePool
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.seeds import seed_of
from rollout.sglang.client import SGLangClient
from rollout.sglang.samples import RoutingShape, empty_sample
from tests.support import toy
from tests.support.embedded_fixtures import Held, served, service
from tests.support.spawn import run_ranks
from tests.support.tiny_models import felt_tensors, tiny, write_checkpoint

HF = tiny(torch_dtype="float32")
SHAPE = RoutingShape(num_layers=3, moe_layers=toy.LAYERS, top_k=toy.TOP_K, num_experts=toy.EXPERTS)
NEW, G, STEPS = 12, 2, 3  # tokens a sample, samples a prompt, steps of the run
HOW: dict[str, Any] = {"dp_size": 1, "max_tokens": 256}


def _prompts(step: int) -> list[Prompt]:
    """Three of unequal length: six samples, of which four run at a time."""
    return [
        Prompt(id=f"{step}.{i}", token_ids=tuple((7 * j + 11 * i + step) % 100 + 2 for j in range(p)), answer="")
        for i, p in enumerate((5, 20, 37))
    ]


def _params(step: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=NEW, sampling_seed=seed_of(0, f"step {step}"))


def _reward(prompt: Prompt, sample: Sample) -> float:
    return float(sample.index)


class Noting(EnginePool):
    """Keeps what it was asked to go on with."""

    def __init__(self, engines: Sequence[SGLangClient]) -> None:
        super().__init__(engines)
        self.continued: list[Sample] = []

    async def continue_sample(self, sample: Sample, environment: Sequence[int] = (), **more: Any) -> Sample:
        self.continued.append(sample)
        return await super().continue_sample(sample, environment, **more)


@dataclass
class Found:
    whole: list[SampleGroup] = field(default_factory=list)  # never aborted, of step 1's prompts
    aborted: list[SampleGroup] = field(default_factory=list)  # the same, aborted twice
    cuts: list[Sample] = field(default_factory=list)  # what went on then
    replayed: dict[str, float] = field(default_factory=dict)  # of the aborted ones by the trainer
    trained: dict[int, list[SampleGroup]] = field(default_factory=dict)  # by the run's steps
    run_cuts: list[Sample] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)  # the run's metrics
    again: list[Sample] = field(default_factory=list)  # step 1's samples of the run, all routed by the last weights


class Dealt:
    """The prompts of all steps in their order."""

    def __init__(self) -> None:
        self.left = (p for step in range(STEPS + 2) for p in _prompts(step))

    def take(self, n: int) -> list[Prompt]:
        return list(itertools.islice(self.left, n))


@dataclass(kw_only=True)
class Trained(Controller):
    """Notes the groups of each step."""

    found: Found

    async def step(self, record: StepRecord, groups: Sequence[SampleGroup]) -> None:
        self.found.trained[record.step + 1] = list(groups)
        await super().step(record, groups)


@dataclass
class World:
    """A server, its engine, and one rank's trainer; the parts that the controller asks for."""

    pool: Noting
    client: SGLangClient
    held: Held
    trainer: Any
    publisher: TensorPublisher
    found: Found
    dp_size: int = 1
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run_groups(self, step: int, prompts: Sequence[Prompt]) -> list[SampleGroup]:
        return await run_groups(self.pool, prompts, scored_by(_reward), n=G, params=_params(step))

    async def aborts(self) -> None:
        """Twice, with some samples under way and some that wait for their turn."""
        held = self.held
        held.until = held.engine.generated + 14
        under_way = asyncio.create_task(self.run_groups(1, _prompts(1)))
        for until in (held.engine.generated + 34, math.inf):
            await held.reached()
            held.until = until
            await self.client.abort_all()
        self.found.aborted = await under_way
        self.found.cuts, self.pool.continued = self.pool.continued, []

    async def groups(self, wave: int, prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[int, SampleGroup], None]:
        """One step's prompts after the other; each but the first is in the middle when a publication comes."""
        for at in range(0, len(prompts), 3):
            step = int(prompts[at].id.split(".")[0])
            async with self.turn:
                if step:
                    self.held.until = self.held.engine.generated + 20
                groups = await self.run_groups(step, prompts[at : at + 3])
            for i, group in enumerate(groups):
                yield at + i, group

    async def abort(self) -> None:
        """No step is over-sampled."""

    async def train(self, batches: Sequence[TrainBatch]) -> StepReport:
        return self.trainer.train([b.grid[0] for b in batches], [b.loss_tokens for b in batches], 0)  # type: ignore[no-any-return]

    async def publish(self, *, version: int) -> PublishReport:
        await self.held.reached()
        self.held.until = math.inf
        return await asyncio.to_thread(self.publisher.publish, self.trainer.export(), version=version)

    def write(self, step: int, metrics: Any) -> None:
        self.found.rows.append(dict(metrics))

    async def run(self) -> None:
        async def nothing(*_: Any, **__: Any) -> None: ...

        async def figures(version: int) -> dict[str, float]:
            return {}

        async def checked(step: int, report: PublishReport) -> tuple[PublishReport, dict[str, float]]:
            return report, {}

        async def snapshot(step: int, whole: bool) -> Snapshot:
            return Snapshot()

        ledger, stop = Ledger(None), StopRequest()
        buffer = DataBuffer(max_staleness=1, samples=G, ledger=ledger)
        producer = Producer(
            groups=len(_prompts(0)),
            buffer=buffer,
            source=Dealt(),
            sampler=self,
        )
        progress, packer, me = PhaseBar(STEPS, Console(quiet=True)), Packer(**HOW), cast(Any, self)
        algorithm = make_algorithm(AlgorithmConfig(), CorrectionConfig())
        recorder = Recorder(sink=me, ledger=ledger, progress=progress)
        unused: Any = SimpleNamespace(
            **dict.fromkeys(("before_training", "before_publication", "begin", "finish"), nothing),
            published=checked,
            figures=figures,
            due=lambda step, *, last: False,
            snapshot=snapshot,
            asynchronous=False,
        )
        controller = Trained(
            found=self.found,
            feed=Feed(buffer=buffer, producer=producer, stop=stop, progress=progress),
            experience=Experience(algorithm=algorithm, packer=packer, trainer=me),
            packer=packer,
            trainer=me,
            checks=unused,
            recorder=recorder,
            evaluator=unused,
            saver=Saver(
                state=unused,
                checkpoints=unused,
                stop=stop,
                deadline=Deadline(stop, None, began=0.0),
                progress=progress,
                every=0,
            ),
        )
        await controller.run(first=0, steps=STEPS)
        self.found.run_cuts = self.pool.continued

    async def all(self) -> None:
        self.found.whole = await self.run_groups(1, _prompts(1))
        await self.aborts()
        (row,) = pack(self.found.aborted, [[1.0] * G] * 3, **HOW).grid
        self.found.replayed = dict(self.trainer.evaluate(row, sum(int(m.loss_mask.sum()) for m in row)))
        await self.run()
        for s in (s for g in self.found.trained[2] for s in g.samples):
            prompt = Prompt(id=s.prompt_id, token_ids=tuple(s.token_ids.tolist()[:-1]), answer="")
            one = SamplingParams(max_new_tokens=1, sampling_seed=0)
            self.found.again.append(await self.client.continue_sample(empty_sample(prompt, s.index), params=one))
        await self.pool.close()


def _one_rank(rank: int, world: int, port: int, where: Path) -> Found:
    from megatron_bridge.convert.to_megatron import to_megatron

    write_checkpoint(where / "hf", HF, felt_tensors(HF))
    to_megatron(where / "hf", where / "shards")
    loss = make_algorithm(AlgorithmConfig(), CorrectionConfig()).loss
    s = service(where / "hf", max_running=4)
    s.engine.set_version("0")
    with served(s) as url, toy.trainer(toy.config(str(where / "hf")), rank, world, port, loss) as t:
        t.load_weights(where / "shards")
        publish = PublishConfig(pause_mode="abort")
        found = Found()

        async def run() -> None:
            client = SGLangClient(url, routing=SHAPE)
            publisher = TensorPublisher(
                PublishTarget(urls=(url,), kind="embedded", spec=None, config=publish), send=True
            )
            await World(Noting([client]), client, Held(s.engine), t, publisher, found).all()

        asyncio.run(run())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(_one_rank, 1, tmp_path_factory.mktemp("partial"), keep=True)[0]  # type: ignore[no-any-return]


def _samples(groups: Sequence[SampleGroup]) -> list[Sample]:
    return [s for g in groups for s in g.samples]


def test_an_aborted_sample_is_the_one_that_was_not(found: Found) -> None:
    """Same weights, same seed: tokens, experts and seals are the same, log-probs but for the order of sums. Some were
    cut in the middle, once or twice, some before they began."""
    lengths = {s.name: [c.response_len for c in found.cuts if c.name == s.name] for s in _samples(found.whole)}
    assert any(0 in cuts for cuts in lengths.values())
    assert any(len(set(cuts)) == 2 for cuts in lengths.values())
    for got, want in zip(_samples(found.aborted), _samples(found.whole), strict=True):
        assert (got.name, got.finish, got.versions) == (want.name, want.finish, want.versions)
        assert got.token_ids.tolist() == want.token_ids.tolist()
        torch.testing.assert_close(got.logprobs, want.logprobs, atol=1e-5, rtol=0)
        assert got.routing is not None and want.routing is not None
        assert torch.equal(got.routing.experts, want.routing.experts)
        assert got.routing.versions == want.routing.versions == (VersionSpan(0, 0, len(got.token_ids) - 1),)
        assert got.reward == want.reward == got.index


def test_the_trainer_replays_what_was_aborted(found: Found) -> None:
    """Packed and verified like any other; both sides hold the same weights, so a row at the wrong place would show."""
    assert found.replayed["routing/replay_coverage"] == found.replayed["routing/agreement"] == 1.0
    assert found.replayed["mismatch/logprob_abs_diff_max"] < 1e-4


def test_a_publication_makes_partial_rollouts_of_two_versions(found: Found) -> None:
    """Every step's batch but the first was under way when its weights came. Tokens up to the cut are of the version
    before, and so are the rows that gave them; the row of the last old token gave the first new one and is new."""
    assert [s.versions for s in _samples(found.trained[1])] == [(VersionSpan(0, 0, NEW),)] * 6
    for step in range(1, STEPS):
        crossed = 0
        for s in _samples(found.trained[step + 1]):
            p, cut = len(s.token_ids) - s.response_len, [c for c in found.run_cuts if c.name == s.name]
            assert s.finish in (Finish.STOP, Finish.LENGTH) and len(cut) <= 1
            assert s.finish is Finish.STOP or s.response_len == NEW
            at = cut[0].response_len if cut else s.response_len
            edges = [(step - 1, 0, at), (step, at, s.response_len)]
            assert s.versions == tuple(VersionSpan(*e) for e in edges if e[1] < e[2])
            rows = [(step - 1, 0, p + at - 1 if at else 0), (step, p + at - 1 if at else 0, len(s.token_ids) - 1)]
            assert s.routing is not None
            assert s.routing.versions == tuple(VersionSpan(*r) for r in rows if r[1] < r[2])
            crossed += len(s.versions) == 2
        assert crossed >= 3, "publications found nothing under way"


def test_what_was_sampled_before_keeps_its_routes_and_log_probs(found: Found) -> None:
    """They are those of the undisturbed rollout. Recomputed under the last weights, some would differ: the law is not
    blind."""
    flips = 0
    trained = _samples(found.trained[2])
    for got, want, again in zip(trained, _samples(found.whole), found.again, strict=True):
        first = got.versions[0]
        if first.version:
            continue  # it had not begun
        n = len(got.token_ids) - got.response_len + first.end
        assert got.routing is not None and want.routing is not None and again.routing is not None
        assert got.token_ids[:n].tolist() == want.token_ids[:n].tolist()
        torch.testing.assert_close(got.logprobs[:n], want.logprobs[:n], atol=1e-5, rtol=0)
        assert torch.equal(got.routing.experts[: n - 1], want.routing.experts[: n - 1])
        flips += int((again.routing.experts[: n - 1] != got.routing.experts[: n - 1]).any(-1).sum())
    assert flips > 0


def test_the_run_replays_every_row(found: Found) -> None:
    steps = found.rows[1:]
    assert [r["weight_version"] for r in steps] == [1.0, 2.0, 3.0]
    assert all(r["routing/replay_coverage"] == 1.0 and math.isfinite(r["train/loss"]) for r in steps)

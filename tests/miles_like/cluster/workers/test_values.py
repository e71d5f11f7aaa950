"""What is computed from tokens that rollout workers hold is, bit for bit, what one process computes that has them all:
streams of ranks, advantages, returns, teachers, rewards of whole rounds.

Ranks and teachers are stand-ins whose words are functions of token and place. Not covered: Ray (test_actors.py), a
whole run (tests/laws/test_rollout_workers.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.algorithms.registry import make_algorithm
from miles_like.batch.packer import Packer
from miles_like.batch.parcel import Parcel
from miles_like.batch.portion import filled
from miles_like.batch.unpacking import unpack
from miles_like.cluster.workers.pool import RolloutWorkers
from miles_like.cluster.workers.values import HeldValues
from miles_like.cluster.workers.worker import RewardOfRounds, Sampling
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.experience.experience import Experience, OwnValues
from miles_like.experience.held_teachers import HeldTeachers
from miles_like.experience.teachers import MovedScores, Teachers, TeacherScores, TrainerTeacher
from miles_like.experience.token_work import TokenWork
from miles_like.loop.buffer import LOST
from miles_like.loop.old_tokens import mask_old
from miles_like.records import ColumnsLostError, PlannedBatch, RecordGroup
from miles_like.types import (
    ENVIRONMENT,
    POLICY,
    Finish,
    MicroBatch,
    Prompt,
    Sample,
    SampleGroup,
    Score,
    Span,
    StepReport,
    Unit,
    Unscored,
    VersionSpan,
)
from rollout.sglang.http_replies import RolloutError
from tests.support.local_workers import LocalWorkers
from tests.support.made_samples import group, sample
from tests.support.refusals import refuses
from tests.support.worker_loop import PLACE, Made

PROMPTS = [Prompt(id=str(i), token_ids=(1, 2), answer="") for i in range(7)]
PACKER = Packer(dp_size=2, max_tokens=64)


def made(prompt: Prompt) -> SampleGroup:
    """Two samples of unequal length, one of which may be cut, some with an environment's token."""
    n = int(prompt.id)
    samples = []
    for i in range(2):
        tokens, reward = 3 + (5 * n + 3 * i) % 6, (n * 7 % 5) / 3 - i
        s = sample(prompt.id, i, first_token=37 * n + i, response_len=tokens, reward=reward)
        if n % 2:
            s = replace(s, versions=(VersionSpan(0, 0, 2), VersionSpan(1, 2, tokens)))
        mask = s.loss_mask.clone()
        mask[3] &= n % 2 == 0 and prompt.source != "turns"  # there it is the environment's
        finish = Finish.LENGTH if n == 4 and i else Finish.STOP
        samples.append(replace(s, loss_mask=mask, logprobs=torch.where(mask, s.logprobs, 0.0), finish=finish))
    if prompt.source == "turns":
        samples = [replace(s, spans=_two_turns(s, n)) for s in samples]
    if prompt.source == "rows":
        further = sample(prompt.id, 1, first_token=900 + n, response_len=2 + n % 3, reward=samples[1].reward)
        samples.append(replace(further, row=1))
    return replace(group(samples), prompt=prompt)


def _two_turns(s: Sample, n: int) -> tuple[Span, ...]:
    cut = Span(who=POLICY, start=2, end=3, reward=n / 7)
    return (cut, Span(who=ENVIRONMENT, start=3, end=4), Span(who=POLICY, start=4, end=s.length))


class Ranks:
    """Says of a label a function of it, its input and the weights, and remembers the micro-batches that it trains."""

    dp_size = 2

    def __init__(self, factor: float, values: HeldValues | None = None) -> None:
        self.factor, self.values = factor, values
        self.trained: list[MicroBatch] = []

    def _said(self, m: MicroBatch, weights: str | None) -> Tensor:
        return (m.labels + 0.1 * m.tokens).sin() * self.factor + len(weights or "")

    async def logprobs(self, batch: Any, *, weights: str | None = None) -> list[list[Tensor]]:
        return [[self._said(m, weights) for m in row] for row in batch.grid]

    async def held_logprobs(
        self, batch: PlannedBatch, *, weights: str | None = None, replay: bool = False
    ) -> Mapping[int, list[Any]]:
        assert not replay
        out: dict[int, list[Any]] = {}
        for row in await self._rows(batch):
            for name, x in unpack([row], [[self._said(m, weights) for m in row]]).items():
                out.setdefault(batch.records[name].holder, []).append(Parcel({name: x}))
        return out

    async def _rows(self, batch: PlannedBatch) -> list[list[MicroBatch]]:
        assert self.values is not None
        places = [(row, PLACE[1]) for row in range(2)]
        pulled = await self.values.pull(batch, places)
        found = zip(batch.grid, places, strict=True)
        return [filled(row, [parcel.value for parcel in pulled.portions[place]]) for row, place in found]

    async def train(self, batches: Sequence[Any]) -> StepReport:
        for batch in batches:
            rows = await self._rows(batch) if isinstance(batch, PlannedBatch) else batch.grid
            self.trained += [m for row in rows for m in row]
        return StepReport(version=1, metrics={})


class Working(Made):
    """A worker that makes the samples above and computes `work` of them."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work = work

    async def groups(
        self, round_index: int, prompts: Sequence[Prompt]
    ) -> AsyncGenerator[tuple[int, SampleGroup], None]:
        for i, prompt in enumerate(prompts):
            yield i, made(prompt)

    def __call__(self, urls: Sequence[str]) -> Sampling:
        return replace(super().__call__(urls), sampler=self, work=self.work)


async def held(workers: int, factory: Any) -> tuple[HeldValues, list[SampleGroup]]:
    """Groups of the prompts, divided over so many workers, in their order."""
    pool = RolloutWorkers(
        start=LocalWorkers([[str(w)] for w in range(workers)], factory),
        tokens=lambda prompt: 10,
        say=lambda text: None,
        bound=1 << 40,
    )
    await pool.begin()
    found = {i: g async for i, g in pool.groups(0, PROMPTS)}
    groups = [found[i] for i in range(len(PROMPTS))]
    assert len({g.samples[0].holder for g in groups if isinstance(g, RecordGroup)}) == workers
    return HeldValues(pool), groups


async def counted(values: HeldValues, groups: Sequence[SampleGroup]) -> None:
    """The driver counts the bytes of all columns, those that the step has added too, until the groups are released."""
    pool: Any = values.workers
    holders = {w.number: w.link.worker.holder for w in pool._workers}
    whole = [s for g in groups for of in holders[g.samples[0].holder].values([g]) for s in of.samples]  # type: ignore[attr-defined]
    own = [x for s in whole for x in (s.token_ids, s.loss_mask, s.logprobs, *s.streams.values())]
    assert any(s.streams for s in whole) == any(h._added for h in holders.values())
    assert pool.nbytes == sum(x.numel() * x.element_size() for x in own)
    values.release(groups)
    await asyncio.sleep(0.01)
    assert not pool.nbytes and not any(h.keys or h._added or h._bytes for h in holders.values())


def of_all(groups: Sequence[SampleGroup]) -> list[list[Any]]:
    """A user's advantages: numbers of the whole rollout, and tokens' for one sample."""
    most = max(s.length for g in groups for s in g.samples)
    out: list[list[Any]] = [[s.length / most for s in g.samples] for g in groups]
    out[2][1] = groups[2].samples[1].token_ids / 9
    return out


def trained(micros: Sequence[MicroBatch]) -> list[Any]:
    """Everything of them, as bytes."""
    out: list[Any] = []
    for m in micros:
        streams = [(name, x.numpy().tobytes()) for name, x in sorted(m.streams.items())]
        out.append((m.samples, m.labels.tolist(), m.loss_mask.tolist(), m.advantages.numpy().tobytes(), streams))
    return out


IN_REWARD = {"kl_coefficient": 0.1, "kl_in": "reward"}
CASES: dict[str, dict[str, Any]] = {
    "a critic": {"name": "ppo", **IN_REWARD},
    "reinforce++, masked": {"name": "reinforce_pp", "mask_truncated": True},
    "whole samples": {"name": "grpo", **IN_REWARD},
    "a greedy answer": {"name": "remax"},
    "a user's": {"name": "grpo", "advantage": f"{__name__}:of_all", "kl_coefficient": 0.0},
    "a user's, with a penalty": {"name": "grpo", "advantage": f"{__name__}:of_all", **IN_REWARD},
    "turns": {"name": "grpo", "turn_credit": "discounted", "turn_discount": 0.5},
    "rows": {"name": "grpo", **IN_REWARD},
    "rows, a critic": {"name": "ppo", **IN_REWARD},
}


async def steps_of(experience: Experience, groups: Sequence[SampleGroup], trainer: Ranks, critic: Ranks) -> Any:
    scored = await experience.score(groups)
    await trainer.train(PACKER.steps(scored, await experience.advantages(0, scored)))
    await experience.learn(scored)
    return trained(trainer.trained), trained(critic.trained)


@pytest.mark.parametrize("case", CASES)
def test_columns_are_those_of_one_process_with_all_samples(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PROMPTS", [replace(p, source=case.split(",")[0]) for p in PROMPTS])
    config = AlgorithmConfig(**CASES[case])
    algorithm = make_algorithm(config, CorrectionConfig())

    async def run(workers: int) -> Any:
        values, groups = await held(workers, Working(TokenWork(algorithm=algorithm))) if workers else (None, None)
        trainer, critic = Ranks(-1.0, values), Ranks(0.3, values)
        experience: Any = Experience(
            algorithm=algorithm,
            packer=PACKER,
            trainer=trainer,  # type: ignore[arg-type]
            critic=critic,  # type: ignore[arg-type]
            values=values or OwnValues(),
            mask_truncated=config.parts.mask_truncated,
        )
        found = await steps_of(experience, groups or [made(p) for p in PROMPTS], trainer, critic)
        if values is not None and groups is not None:
            await counted(values, groups)
        return found

    alone = asyncio.run(run(0))
    assert any(any(bytes(x[3])) for x in alone[0]) and bool(alone[1]) == config.has_critic
    for workers in (1, 2, 3):
        assert asyncio.run(run(workers)) == alone


def test_old_tokens_are_masked_where_they_are_held() -> None:
    """With advantages that are computed of the others alone."""
    algorithm = make_algorithm(AlgorithmConfig(name="reinforce_pp", kl_coefficient=0.0), CorrectionConfig())

    async def run(workers: int) -> Any:
        values, groups = await held(workers, Working(TokenWork(algorithm=algorithm))) if workers else (None, None)
        whole = groups or [made(p) for p in PROMPTS]
        left = [g for one in whole if (g := mask_old(one, version=1, max_staleness=0)) is not None]
        trainer = Ranks(1.0, values)
        given = await (values or OwnValues()).advantages(algorithm, left)
        batches = PACKER.steps(left, given)
        await trainer.train(batches)
        return [b.versions for b in batches], trained(trainer.trained)

    versions, alone = asyncio.run(run(0))
    assert versions == [(1, 1)] and alone
    for workers in (1, 3):
        assert asyncio.run(run(workers)) == (versions, alone)


class Spoken:
    """A teacher on servers that says a function of the token; after `ends` requests its server has ended."""

    early = False

    def __init__(self, ends: int = 0) -> None:
        self.left = ends

    async def start(self) -> None: ...
    async def close(self) -> None: ...

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[TeacherScores]]:
        self.left -= 1
        if self.left >= 0:
            raise RolloutError("its server has ended")
        return [[TeacherScores(s.token_ids[2:].float().cos()) for s in g.samples] for g in groups]


def hinted(prompt: Prompt) -> Sequence[int]:
    return (9, *prompt.token_ids, *range(int(prompt.id)))


def teacher_of(source: str) -> str | None:
    return {"": "served", "x": "of the trainer"}.get(source)


@pytest.mark.parametrize("at_once", [False, True])
def test_teachers_say_the_same_whoever_holds_the_samples(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On servers, one of which ends once, and by the trainer's weights after a prompt of another length."""
    prompts = [replace(p, source=("", "x", "none")[i % 3]) for i, p in enumerate(PROMPTS)]
    monkeypatch.setattr(f"{__name__}.PROMPTS", prompts)

    def of(trainer: Ranks) -> TrainerTeacher:
        return TrainerTeacher(trainer=trainer, weights="t", packer=PACKER, prompt_of=hinted)  # type: ignore[arg-type]

    async def alone() -> Any:
        teachers = Teachers({"served": Spoken(), "of the trainer": of(Ranks(-1.0))}, teacher_of)
        scored = await teachers.score([made(p) for p in prompts])
        return scored, teachers.metrics(scored)

    async def by(workers: int) -> Any:
        there = Teachers({"served": Spoken(1), "of the trainer": MovedScores(prompt_of=hinted)}, teacher_of)
        work: Any = TokenWork(algorithm=make_algorithm(AlgorithmConfig(), CorrectionConfig()), teachers=there)
        values, groups = await held(workers, Working(work))
        own = Teachers({"of the trainer": of(Ranks(-1.0, values))}, teacher_of)
        restarts = []

        async def restarted() -> bool:
            restarts.append(1)
            return True

        own.restarted = restarted  # type: ignore[method-assign]
        teachers = HeldTeachers(own=own, values=values, at_once=at_once, serving=contextlib.nullcontext)
        scored = await teachers.score(groups)
        assert restarts == [1]
        holders = {w.number: w.link.worker.holder for w in values.workers._workers}  # type: ignore[attr-defined]
        whole = [holders[g.samples[0].holder].values([g])[0] for g in scored]  # type: ignore[attr-defined]
        assert sum(len(h.keys) for h in holders.values()) == len(prompts)  # what the trainer was asked is freed
        await counted(values, groups)
        return whole, teachers.metrics(scored)

    expected, metrics = asyncio.run(alone())
    for workers in (1, 3):
        found, of_workers = asyncio.run(by(workers))
        assert of_workers == metrics and metrics["distill/tokens/served"] and metrics["distill/tokens/of the trainer"]
        for one, other in zip(expected, found, strict=True):
            for a, b in zip(one.samples, other.samples, strict=True):
                assert a.streams.keys() == b.streams.keys()
                assert all(torch.equal(a.streams[k], b.streams[k]) for k in a.streams)


def test_a_worker_that_has_ended_loses_its_groups_alone() -> None:
    async def run() -> None:
        algorithm = make_algorithm(AlgorithmConfig(name="reinforce_pp"), CorrectionConfig())
        values, groups = await held(2, Working(TokenWork(algorithm=algorithm)))
        values.workers._workers[0].link.end()
        for ask in (lambda: values.advantages(algorithm, groups), lambda: values.gathered("measure", groups)):
            with pytest.raises(ColumnsLostError) as lost:
                await ask()
            assert [lost.value.has_lost(g) for g in groups] == [g.samples[0].holder == 0 for g in groups]  # type: ignore[attr-defined]

    asyncio.run(run())


def test_advantages_that_do_not_fit_are_refused_by_the_worker() -> None:
    async def run(advantages: Callable[..., Any]) -> None:
        algorithm = make_algorithm(AlgorithmConfig(advantage=f"{__name__}:of_all"), CorrectionConfig())
        values, groups = await held(2, Working(TokenWork(algorithm=replace(algorithm, advantage=advantages))))  # type: ignore[type-var]
        await values.advantages(algorithm, groups)

    with refuses(ValueError, 7, 0):
        asyncio.run(run(lambda groups: []))
    with refuses(ValueError, "0", "non-finite"):
        asyncio.run(run(lambda groups: [[torch.full((s.length,), torch.nan) for s in g.samples] for g in groups]))


class Compared:
    """A reward of whole rounds: the rank of a sample among all; None for the last."""

    unit, slow, compares = Unit.BATCH, False, None

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    async def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Sequence[Score | Unscored]:
        self.calls.append([s.name for s in samples])
        if any(p.id == "13" for p in prompts):
            raise RuntimeError("a user's mistake")
        return [Score(value=float(i)) for i in range(len(samples))]

    async def close(self) -> None: ...


class Rounds(Made):
    """Each share is sampled at once, where `gates` has no closed one for its worker, and then scored."""

    def __init__(self, reward: Compared, gates: Mapping[str, asyncio.Event]) -> None:
        super().__init__()
        self.reward, self.gates = reward, gates

    def __call__(self, urls: Sequence[str]) -> Sampling:
        own: Any = _Share(self, urls[0])
        return replace(super().__call__(urls), sampler=own, reward=self.reward, filter=lambda group: None)


class _Share:
    def __init__(self, of: Rounds, url: str) -> None:
        self.of, self.url, self.reward = of, url, RewardOfRounds(of.reward)

    async def groups(self, number: int, prompts: Sequence[Prompt]) -> AsyncIterator[tuple[int, SampleGroup]]:
        if (gate := self.of.gates.get(self.url)) is not None:
            await gate.wait()
        pairs = [(p, replace(s, reward=None)) for p in prompts for s in made(p).samples]
        scores = iter(await self.reward([p for p, _ in pairs], [s for _, s in pairs]))
        for i, prompt in enumerate(prompts):
            samples = (replace(s, reward=score.value) for s, score in zip(made(prompt).samples, scores, strict=False))
            yield i, SampleGroup(prompt=prompt, samples=tuple(samples))

    async def abort(self) -> None: ...


@pytest.mark.parametrize("workers", [1, 3])
def test_a_reward_of_whole_rounds_is_called_once_with_all_samples_in_order(workers: int) -> None:
    reward = Compared()

    async def run() -> None:
        _, groups = await held(workers, Rounds(reward, {}))
        assert [r for g in groups for r in g.rewards] == [float(i) for i in range(14)]

    asyncio.run(run())
    assert reward.calls == [[s.name for p in PROMPTS for s in made(p).samples]]


def test_a_round_is_scored_without_the_worker_that_ends() -> None:
    """While the others wait; its prompts are refused as lost."""
    reward, gate = Compared(), asyncio.Event()

    async def run() -> list[SampleGroup]:
        start = LocalWorkers([["0"], ["1"], ["2"]], Rounds(reward, {"1": gate}))
        pool = RolloutWorkers(start=start, tokens=lambda p: 10, say=lambda text: None, bound=1, restarts=0)
        await pool.begin()
        found: dict[int, SampleGroup] = {}

        async def sample_all() -> None:
            async for i, g in pool.groups(0, PROMPTS):
                found[i] = g

        task = asyncio.create_task(sample_all())
        while not all(share.unscored for n in (0, 2) for share in start.links[n].worker._shares.values()):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert not reward.calls
        start.links[1].end()
        await asyncio.wait_for(task, 60)
        return [found[i] for i in range(len(PROMPTS))]

    groups = asyncio.run(run())
    lost = [i for i, g in enumerate(groups) if isinstance(g, RecordGroup) and g.refused == LOST]
    assert lost == [1, 4]
    assert reward.calls == [[s.name for i, p in enumerate(PROMPTS) if i not in lost for s in made(p).samples]]


def test_a_reward_that_fails_ends_the_round() -> None:
    async def run() -> None:
        pool = RolloutWorkers(
            start=LocalWorkers([["0"], ["1"]], Rounds(Compared(), {})),
            tokens=lambda prompt: 10,
            say=lambda text: None,
            bound=1,
        )
        await pool.begin()
        prompts = [*PROMPTS, replace(PROMPTS[0], id="13")]
        [g async for g in pool.groups(0, prompts)]

    with pytest.raises(RuntimeError, match="a user's mistake"):
        asyncio.run(run())

"""OPO, ReMax, Clip-Cov, KL-Cov and the KL estimator `abs` are verl's (0.8.0.dev, commit b178a3c, `core_algos.py`:
its outcome advantages `opo` and `remax`, its policy losses `clip_cov` and `kl_cov`, kl_penalty_forward).

verl is not installed: its formulas are written out here over its padded layout [samples, LONGEST], as plain loops where
it has loops. Ours get the same samples packed, and the engine's greedy answers. By choice ours differ in one case: a
group of one sample, which has no baseline in verl's OPO, teaches nothing here.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.algorithms.advantages.remax import GREEDY_INDEX, without_greedy, without_loss
from miles_like.algorithms.filters import make_filter
from miles_like.algorithms.losses.covariance import ClipCovLoss, KlCovLoss
from miles_like.algorithms.registry import make_algorithm
from miles_like.algorithms.terms.kl import kl_estimate
from miles_like.batch.packer import Packer
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.experience.experience import Experience
from miles_like.types import GREEDY, REFERENCE, Finish, LossInputs, Prompt, Sample, SampleGroup, SamplingParams
from rollout.episodes.greedy import GreedyFirst, greedy_seed
from rollout.episodes.resuming import EngineWrapper
from tests.support.made_samples import group, sample
from tests.support.refusals import refuses

LENGTHS = (5, 1, 9, 4, 2, 12)
LONGEST = 12
MASK = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
CU = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
REWARDS = ((1.0, 0.0, 0.5), (-1.0, 2.0, 2.0))


def made(**keys: Any) -> Any:
    return make_algorithm(AlgorithmConfig(**keys), CorrectionConfig())


def scored() -> list[SampleGroup]:
    lengths = iter(LENGTHS)
    return [
        group([sample(f"p{p}", i, response_len=next(lengths), reward=r) for i, r in enumerate(rewards)])
        for p, rewards in enumerate(REWARDS)
    ]


def test_opo_is_verl_s() -> None:
    want = []
    for p, rewards in enumerate(REWARDS):
        lengths = LENGTHS[3 * p : 3 * p + 3]
        baseline = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
        want.append([r - baseline for r in rewards])
    got = made(advantage="opo").advantages(scored())
    assert got == [pytest.approx(x, abs=1e-12) for x in want]
    nothing = [replace(s, loss_mask=torch.zeros_like(s.loss_mask)) for s in scored()[0].samples]
    assert made(advantage="opo").advantages([group(nothing)]) == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_remax_is_verl_s(coefficient: float) -> None:
    """verl's batch has the sampled answers alone and the greedy ones' rewards beside them; its reward of a token has
    the penalty, its greedy reward has none."""
    g = torch.Generator().manual_seed(0)
    groups = [
        replace(x, samples=tuple(_with_reference(s, torch.randn(len(s.token_ids), generator=g)) for s in x.samples))
        for x in scored()
    ]
    keys: dict[str, Any] = {"kl_coefficient": coefficient, "kl_in": "reward"} if coefficient else {}
    algorithm = made(name="remax", **keys)
    assert GREEDY in algorithm.needs and (REFERENCE in algorithm.needs) == bool(coefficient)
    masked = asyncio.run(_experience(algorithm).score(groups)) if not coefficient else _masked(groups)
    got = algorithm.advantages(masked)
    for x, of_group, rewards in zip(groups, got, REWARDS, strict=True):
        assert not of_group[GREEDY_INDEX].any()
        for s, advantage, reward in list(zip(x.samples, of_group, rewards, strict=True))[1:]:
            token_rewards = -coefficient * (s.logprobs - s.streams[REFERENCE])[s.loss_mask].double()
            token_rewards[-1] += reward
            returns = token_rewards.flip(0).cumsum(0).flip(0)
            torch.testing.assert_close(advantage[s.loss_mask].double(), returns - rewards[0], rtol=1e-6, atol=1e-6)
            assert not advantage[~s.loss_mask].any()


def _with_reference(s: Sample, noise: Tensor) -> Sample:
    return replace(s, streams={REFERENCE: s.logprobs + 0.2 * noise})


def _masked(groups: Sequence[SampleGroup]) -> list[SampleGroup]:
    return without_loss(groups)


def _experience(algorithm: Any) -> Experience:
    return Experience(algorithm=algorithm, packer=Packer(dp_size=1, max_tokens=99), trainer=None)  # type: ignore[arg-type]


def test_a_greedy_answer_is_measured_apart_and_never_trained_on() -> None:
    kept, greedy = without_greedy(scored())
    assert greedy == [1.0, -1.0] and [[s.index for s in x.samples] for x in kept] == [[1, 2], [1, 2]]
    batch = Packer(dp_size=1, max_tokens=99).batch(_masked(scored()))
    assert {name for row in batch.grid for m in row for name in m.samples} == {"p0/1", "p0/2", "p1/1", "p1/2"}
    keep = make_filter("off", greedy=True)
    whole = scored()[0]
    assert keep(whole) is None
    assert keep(replace(whole, samples=whole.samples[1:])) == "its greedy answer has no score"
    assert keep(replace(whole, samples=whole.samples[:1])) == "no sampled answer has a score"
    with refuses(ValueError, "p0", 0, "remax"):
        made(advantage="remax").advantages([replace(whole, samples=whole.samples[1:])])


class Recording(EngineWrapper):
    """Answers with the parameters that it was asked with; every first answer is aborted after one token."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, SamplingParams]] = []

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> list[SampleGroup]:
        self.asked.append(("generate", n, params))
        first = 100 if params.temperature == 0 else 0
        return [
            SampleGroup(
                prompt=p,
                samples=tuple(
                    sample(p.id, i, response_len=1, first_token=first + i, finish=Finish.ABORT) for i in range(n)
                ),
            )
            for p in prompts
        ]

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        self.asked.append(("continue", sample.index, params))
        return replace(sample, finish=Finish.STOP)


def test_the_first_of_a_prompt_s_samples_is_greedy_also_where_it_is_continued() -> None:
    """The engine sees each sample under the index and the seed that it was begun with: partial rollouts and random
    streams are keyed by them."""
    inner, params = Recording(), SamplingParams(max_new_tokens=8, temperature=0.7, sampling_seed=5)
    engine = GreedyFirst(inner)
    prompts = [Prompt(id=f"p{i}", token_ids=(1, 2), answer="") for i in range(2)]

    async def ask() -> list[Sample]:
        groups = await engine.generate(prompts, n=3, params=params)
        assert [[s.index for s in g.samples] for g in groups] == [[0, 1, 2]] * 2
        assert [int(s.token_ids[0]) for s in groups[1].samples] == [100, 0, 1]
        return [await engine.continue_sample(s, params=params) for s in groups[0].samples]

    done = asyncio.run(ask())
    assert [(s.index, s.finish) for s in done] == [(i, Finish.STOP) for i in range(3)]
    greedy = replace(params, temperature=0.0, sampling_seed=greedy_seed(5))
    assert inner.asked == [
        ("generate", 1, greedy),
        ("generate", 2, params),
        ("continue", 0, greedy),
        ("continue", 0, params),
        ("continue", 1, params),
    ]
    with refuses(ValueError, 1, 2):
        asyncio.run(engine.generate(prompts, n=1, params=params))


# ---- losses


def tokens(spread: float = 0.3) -> dict[str, Tensor]:
    """[samples, LONGEST] fp64, with arbitrary values outside the mask."""
    g = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), LONGEST)
    new = -3 * torch.rand(shape, generator=g, dtype=torch.float64)
    return {
        "new": new,
        "old": new + spread * torch.randn(shape, generator=g, dtype=torch.float64),
        "advantages": 2 * torch.randn(shape, generator=g, dtype=torch.float64),
    }


def covariance(data: dict[str, Tensor]) -> Tensor:
    a, p = data["advantages"], data["new"].detach()
    return (a - a[MASK].mean()) * (p - p[MASK].mean())


def their_clip_cov(data: dict[str, Tensor], *, ratio: float, low: float, high: float) -> tuple[Tensor, Tensor, int]:
    """(losses of tokens without the choice, tokens that may be chosen, how many are)."""
    r, a = (data["new"] - data["old"]).exp(), data["advantages"]
    first, second = -a * r, -a * r.clamp(0.8, 1.28)
    cov = covariance(data)
    cov[~MASK] = -torch.inf
    cov[(second > first) & MASK] = -torch.inf
    return torch.maximum(first, second), (cov < high) & (cov > low) & MASK, max(int(ratio * int(MASK.sum())), 1)


def ours(fn: Any, data: dict[str, Tensor]) -> Tensor:
    """[R] losses of the loss tokens."""
    flat = {name: x[MASK] for name, x in data.items()}
    zeros = torch.zeros(len(flat["new"]), dtype=torch.float64)
    loss, _ = fn(
        LossInputs(
            logprobs=flat["new"],
            entropy=zeros,
            rollout_logprobs=flat["old"],
            old_logprobs=flat["old"],
            advantages=flat["advantages"],
            loss_mask=torch.ones(len(zeros), dtype=torch.bool),
            cu_seqlens=CU,
        )
    )
    return loss


def equal(mine: Tensor, theirs: Tensor, at: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    grads = [torch.autograd.grad(x.sum(), at, retain_graph=True)[0][MASK] for x in (mine, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)


def test_clip_cov_is_verl_s() -> None:
    """All candidates are chosen where there is room for them; of more, as many as verl's permutation leaves."""
    data = tokens()
    data["new"].requires_grad_()
    for share in (1.0, 0.1):
        losses, may, count = their_clip_cov(data, ratio=share, low=0.5, high=2.0)
        mine = ours(made(loss="clip_cov", cov_ratio=share, cov_low=0.5, cov_high=2.0).loss, data)
        dropped = (mine == 0) & (losses[MASK] != 0)
        assert not (dropped & ~may[MASK]).any()
        assert int(dropped.sum()) == min(count, int(may.sum()))
        equal(mine, torch.where(dropped, 0.0, losses[MASK]), data["new"])
    assert count == 3 < int(may.sum()) < int(MASK.sum()), "or nothing is drawn"


def test_the_draw_is_one_of_the_micro_batch_s_values() -> None:
    fn, data = made(loss="clip_cov", cov_ratio=0.1, cov_low=0.2, cov_high=9.0).loss, tokens()
    draws = [ours(fn, data), ours(fn, tokens()), ours(fn, data | {"advantages": data["advantages"] * (1 + 1e-9)})]
    chosen = [x == 0 for x in draws]
    assert torch.equal(chosen[0], chosen[1]) and not torch.equal(chosen[0], chosen[2])


@pytest.mark.parametrize("share", [1e-4, 0.2, 1.0])
def test_kl_cov_is_verl_s(share: float) -> None:
    data = tokens()
    data["new"].requires_grad_()
    r, a = (data["new"] - data["old"]).exp(), data["advantages"]
    losses = (-a * r)[MASK]
    cov = covariance(data)[MASK]
    largest = cov.topk(max(1, int(len(cov) * share))).indices
    penalty = torch.zeros_like(losses)
    penalty[largest] = 1.0
    theirs = losses + 0.7 * penalty * (data["new"] - data["old"]).abs()[MASK]
    equal(ours(made(loss="kl_cov", cov_ratio=share, cov_coefficient=0.7).loss, data), theirs, data["new"])


def test_masked_values_and_empty_micro_batches_change_nothing() -> None:
    for fn in (made(loss="clip_cov", cov_ratio=1.0, cov_low=0.5).loss, made(loss="kl_cov", cov_ratio=0.3).loss):
        data = tokens()
        packed = {name: x.flatten() for name, x in data.items()}
        zeros = torch.zeros(len(packed["new"]), dtype=torch.float64)
        given = LossInputs(
            logprobs=torch.where(MASK.flatten(), packed["new"], 1e6),
            entropy=zeros,
            rollout_logprobs=packed["old"],
            old_logprobs=packed["old"],
            advantages=packed["advantages"],
            loss_mask=MASK.flatten(),
            cu_seqlens=torch.arange(0, len(zeros) + 1, LONGEST, dtype=torch.int32),
        )
        loss, stats = fn(given)
        dense = ours(fn, data)
        torch.testing.assert_close(loss[MASK.flatten()].sort().values, dense.sort().values)
        assert not loss[~MASK.flatten()].any() and float(stats["train/cov/chosen_frac"].total) >= 1
        empty, _ = fn(replace(given, loss_mask=torch.zeros_like(given.loss_mask)))
        assert not empty.any()
        assert pickle.loads(pickle.dumps(fn)) == fn


def test_bounds_without_a_token_between_them_are_refused() -> None:
    with refuses(ValueError, 5.0, 2.0):
        AlgorithmConfig(loss="clip_cov", cov_low=5.0, cov_high=2.0)
    with refuses(ValueError, 3.0):
        ClipCovLoss(clip_low=0.2, clip_high=0.28, cov_ratio=0.1, cov_low=3.0, cov_high=3.0)
    assert isinstance(made(loss="kl_cov").loss, KlCovLoss)


def test_abs_is_verl_s_in_loss_and_reward() -> None:
    ref, new = (-3 * torch.rand(40, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (0, 1))
    new.requires_grad_()
    mine, theirs = kl_estimate(ref - new, "abs"), (new - ref).abs()
    torch.testing.assert_close(mine, theirs)
    for x in (mine, theirs):
        x.sum().backward(retain_graph=True)
    assert new.grad is not None and torch.equal(new.grad, 2 * torch.sign(new.detach() - ref))
    for kl_in in ("loss", "reward"):
        algorithm = made(kl_coefficient=0.25, kl_in=kl_in, kl_estimator="abs")
        part = algorithm.loss if kl_in == "loss" else algorithm.advantage.penalty
        assert (part.kl_estimator if kl_in == "loss" else part.estimator) == "abs"

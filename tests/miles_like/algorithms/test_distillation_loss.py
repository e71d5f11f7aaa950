"""What a teacher's word does to advantages and loss.

Oracles: the reverse KL in closed form, GKD's loss as trl has it, torch's kl_div, finite differences. Not covered: what
a trainer on several ranks makes of candidates (its own tests), and whether it learns (docs/studies/distillation.md).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.algorithms.distillation import (
    CandidateLoss,
    Distilled,
    distill_metrics,
    distilled,
    divergence,
    taught_numbers,
)
from miles_like.algorithms.losses.clipped import ClippedLoss
from miles_like.algorithms.registry import make_algorithm
from miles_like.batch.packing import pack
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.protocols import Algorithm
from miles_like.types import TAUGHT, TEACHER, TEACHER_CANDIDATES, VALUES, LossInputs, Sample, SampleGroup
from tests.support.made_samples import group, sample

GRPO = make_algorithm(AlgorithmConfig(), CorrectionConfig())


def dists(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    student, teacher = (2 * torch.randn(*shape, generator=g, dtype=torch.float64) for _ in range(2))
    return student, teacher.log_softmax(-1)


def taught(s: Sample, teacher: list[float], spoke: bool = True) -> Sample:
    """`teacher` on the response's tokens."""
    where = s.loss_mask.float() * spoke
    stream = torch.zeros(len(where))
    stream[s.loss_mask] = torch.tensor(teacher)
    return replace(s, streams={TEACHER: stream, TAUGHT: where})


def two() -> SampleGroup:
    """Sampled at -.002, -.003, -.004; rewards 1 and 0."""
    samples = [sample("p", i, reward=1.0 - i) for i in range(2)]
    return group([taught(samples[0], [-1.0, -2.0, -0.5]), taught(samples[1], [-3.0, -0.1, -0.1])])


def test_alone_the_advantage_is_minus_what_the_student_is_above_the_teacher() -> None:
    d = distilled(GRPO, mode="alone", coefficient=2.0, top_k=0)
    ((first, second),) = d.advantages([two()])
    assert first.tolist() == pytest.approx([0, 0, 2 * (-1 + 0.002), 2 * (-2 + 0.003), 2 * (-0.5 + 0.004)])
    assert second.tolist() == pytest.approx([0, 0, 2 * (-3 + 0.002), 2 * (-0.1 + 0.003), 2 * (-0.1 + 0.004)])
    assert d.needs == {TEACHER} and d.returns([two()]) is None and d.loss is GRPO.loss
    assert d.name == "grpo" and d.aggregation is GRPO.aggregation


def test_added_it_comes_on_top_of_the_reward_s() -> None:
    alone = distilled(GRPO, mode="alone", coefficient=0.5, top_k=0).advantages([two()])
    added = distilled(GRPO, mode="added", coefficient=0.5, top_k=0).advantages([two()])
    for one, more, reward in zip(alone[0], added[0], GRPO.advantages([two()])[0], strict=True):
        assert more.tolist() == pytest.approx((one + reward).tolist(), abs=1e-6)


def test_of_what_nobody_taught_only_the_reward_speaks() -> None:
    silent = group([taught(s, [-9.0] * 3, spoke=False) for s in two().samples])
    for one, reward in zip(
        distilled(GRPO, mode="added", coefficient=1.0, top_k=0).advantages([silent])[0],
        GRPO.advantages([silent])[0],
        strict=True,
    ):
        assert one.tolist() == pytest.approx([reward] * 5)


class WithCritic:
    """An algorithm that asks for more than a reward."""

    name, loss, aggregation, needs = "ppo", GRPO.loss, GRPO.aggregation, frozenset({VALUES})

    def advantages(self, groups: Any) -> Any:
        return GRPO.advantages(groups)

    def returns(self, groups: Any) -> Any:
        return [[s.streams[VALUES] for s in g.samples] for g in groups]


def test_a_critic_has_its_work_only_beside_a_reward() -> None:
    base: Algorithm = WithCritic()
    assert distilled(base, mode="added", coefficient=1.0, top_k=0).needs == {TEACHER, VALUES}
    assert distilled(base, mode="alone", coefficient=1.0, top_k=0).needs == {TEACHER}
    assert distilled(base, mode="alone", coefficient=1.0, top_k=0).returns([two()]) is None


def test_the_mean_advantage_is_minus_the_reverse_kl() -> None:
    """Weighted by the student's own probabilities, over all tokens that it could have sampled."""
    logits, teacher = dists(40)
    student = logits.log_softmax(-1)
    one = sample("p", 0, prompt_len=1, response_len=40)
    logprobs = torch.cat([torch.zeros(1), student.float()])
    streams = {TEACHER: torch.cat([torch.zeros(1), teacher.float()]), TAUGHT: one.loss_mask.float()}
    d = distilled(GRPO, mode="alone", coefficient=1.0, top_k=0)
    ((advantages,),) = d.advantages([group([replace(one, logprobs=logprobs, streams=streams)])])
    want = torch.nn.functional.kl_div(teacher, student, reduction="sum", log_target=True)
    assert float((student.exp() * advantages[1:]).sum()) == pytest.approx(-float(want), rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_over_the_whole_vocabulary_it_is_trl_s(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens are candidates, in whatever order; nothing is left for the bucket."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    logits, teacher = dists(7, 12)
    logits.requires_grad_()
    want = GKDTrainer.generalized_jsd_loss(logits[None], teacher[None], beta=beta, reduction="sum")
    (slope,) = torch.autograd.grad(want, logits)
    ids = torch.stack([torch.randperm(12, generator=torch.Generator().manual_seed(i)) for i in range(7)])
    got = divergence(logits.log_softmax(-1).gather(1, ids), teacher.gather(1, ids), beta=beta).sum()
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    torch.testing.assert_close(torch.autograd.grad(got, logits)[0], slope, atol=1e-6, rtol=1e-5)


def test_the_others_are_one_bucket() -> None:
    """p = (.5, .2 | .3), q = (.6, .3 | .1), by hand; never above the whole vocabulary's, and its where p / q is the
    same for all others."""
    p, q = torch.tensor([[0.5, 0.2]]), torch.tensor([[0.6, 0.3]])
    by_hand = 0.5 * math.log(5 / 6) + 0.2 * math.log(2 / 3) + 0.3 * math.log(3)
    assert float(divergence(p.log(), q.log())) == pytest.approx(by_hand, rel=1e-5)
    split = torch.tensor([0.5, 0.2, 0.2, 0.1]), torch.tensor([0.6, 0.3, 0.2 / 3, 0.1 / 3])
    assert float((split[0] * (split[0] / split[1]).log()).sum()) == pytest.approx(by_hand, rel=1e-5)
    for beta in (0.0, 0.3, 1.0):
        logits, teacher = dists(200, 9, seed=3)
        student = logits.log_softmax(-1)
        ids = teacher.topk(4).indices
        some = divergence(student.gather(1, ids), teacher.gather(1, ids), beta=beta)
        assert (some <= divergence(student, teacher, beta=beta) + 1e-5).all() and (some >= 0).all()


def test_what_is_certain_stays_finite() -> None:
    """A teacher whose candidates are all there is, a student that puts everything elsewhere, and both at once."""
    sure, elsewhere = torch.tensor([[0.0, -40.0]]), torch.tensor([[-40.0, -45.0]])
    for a in (sure, elsewhere):
        for b in (sure, elsewhere):
            x = a.clone().requires_grad_()
            d = divergence(x, b)
            d.sum().backward()
            assert bool(d.isfinite().all()) and bool(x.grad is not None and x.grad.isfinite().all())
    assert float(divergence(sure, sure)) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_gradient_by_finite_differences(beta: float) -> None:
    logits, teacher = dists(5, 8)
    ids = teacher.topk(3).indices
    logits.requires_grad_()

    def f(x: Tensor) -> Tensor:
        return divergence(x.log_softmax(-1).gather(1, ids), teacher.gather(1, ids), beta=beta)

    assert torch.autograd.gradcheck(f, (logits,))


def candidate_call(loss: CandidateLoss, student: Tensor, teacher: Tensor, spoke: list[bool], mask: list[bool]) -> Any:
    n = len(student)
    logprobs = torch.full((n,), -1.0)
    return loss(
        LossInputs(
            logprobs=logprobs,
            entropy=torch.zeros(n),
            rollout_logprobs=logprobs,
            advantages=torch.ones(n),
            loss_mask=torch.tensor(mask),
            cu_seqlens=torch.tensor([0, n], dtype=torch.int32),
            ref_logprobs=None,
            old_logprobs=None,
            streams={TEACHER_CANDIDATES: teacher, TAUGHT: torch.tensor(spoke).float()},
            candidate_logprobs=student,
        )
    )


def test_candidates_are_added_to_the_loss_where_a_teacher_spoke() -> None:
    """Rows without a teacher, or not under loss, may hold anything: neither value nor gradient comes of it."""
    student = torch.tensor([[0.5, 0.2], [0.5, 0.2], [1.0, 1.0], [0.3, 0.3]]).log()
    student[3] = torch.inf
    student.requires_grad_()
    teacher = torch.tensor([[0.6, 0.3], [0.6, 0.3], [0.0, 0.0], [0.0, 0.0]]).log()
    base = ClippedLoss(clip_low=0.2, clip_high=0.28)
    loss, stats = candidate_call(
        CandidateLoss(base=base, coefficient=2.0), student, teacher, [True, True, False, True], [True] * 3 + [False]
    )
    apart = 0.5 * math.log(5 / 6) + 0.2 * math.log(2 / 3) + 0.3 * math.log(3)
    assert loss.tolist() == pytest.approx([2 * apart - 1, 2 * apart - 1, -1.0, 0.0], rel=1e-5)
    assert float(stats["distill/candidates_divergence"].total) == pytest.approx(2 * apart, rel=1e-5)
    assert float(stats["distill/teacher_others"].total) == pytest.approx(0.2, rel=1e-5)
    assert float(stats["train/pg_loss"].total) == pytest.approx(-3.0)
    loss.sum().backward()
    assert student.grad is not None and bool(student.grad[:2].abs().min() > 0) and not student.grad[2:].any()


def test_with_candidates_the_advantages_are_the_algorithm_s_or_0() -> None:
    def of(mode: Any) -> Distilled:
        return distilled(GRPO, mode=mode, coefficient=1.0, top_k=4, beta=0.5)

    assert of("alone").advantages([two()]) == [[0.0, 0.0]]
    assert of("added").advantages([two()]) == GRPO.advantages([two()])
    assert of("added").loss == CandidateLoss(base=GRPO.loss, coefficient=1.0, beta=0.5)


def test_metrics_are_of_all_teachers_and_of_each() -> None:
    other = group([taught(sample("q", 0), [-1.0, -1.0, -1.0])])
    other = replace(other, prompt=replace(other.prompt, source="other"))
    silent = group([taught(sample("r", 0), [0.0] * 3, spoke=False)])
    silent = replace(silent, prompt=replace(silent.prompt, source="untaught"))
    groups = [two(), other, silent]
    found = distill_metrics(groups, taught_numbers(groups), {"": "big", "other": "small", "untaught": None}.get)
    assert found["distill/tokens"] == 9 and found["distill/tokens/big"] == 6 and found["distill/tokens/small"] == 3
    big = (1.0 + 2.0 + 0.5 + 3.0 + 0.1 + 0.1) / 6
    assert found["distill/teacher_logprob/big"] == pytest.approx(-big)
    assert found["distill/reverse_kl/big"] == pytest.approx(big - 0.003)
    assert found["distill/reverse_kl/small"] == pytest.approx(1 - 0.003)
    assert found["distill/reverse_kl"] == pytest.approx((6 * big + 3) / 9 - 0.003)


def test_every_metric_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    even = torch.full((1, 2), 0.25).log()
    _, stats = candidate_call(CandidateLoss(base=GRPO.loss, coefficient=1.0), even, even, [True], [True])
    of_rollout = distill_metrics([two()], taught_numbers([two()]), lambda source: "NAME")
    keys = {key for key in (*stats, *of_rollout) if key.startswith("distill/")}
    assert len(keys) == 8 and not [key for key in keys if f"`{key}`" not in page]


def test_streams_of_teachers_and_candidates_are_packed_with_their_labels() -> None:
    """What `Distilled` gives is what `pack` takes: advantages of tokens, streams and candidates of the label."""
    one = two().samples[0]
    candidates = torch.arange(10).view(5, 2)
    one = replace(one, candidates=candidates, streams={**one.streams, TEACHER_CANDIDATES: candidates / 10})
    d = distilled(GRPO, mode="alone", coefficient=1.0, top_k=0)
    ((micro,),) = pack([group([one])], d.advantages([group([one])]), dp_size=1, max_tokens=99).grid
    assert micro.candidates is not None and torch.equal(micro.candidates, candidates[1:])
    assert torch.equal(micro.streams[TEACHER], one.streams[TEACHER][1:])
    assert torch.equal(micro.streams[TEACHER_CANDIDATES], (candidates / 10)[1:])
    assert micro.advantages.tolist() == pytest.approx([0.0, -0.998, -1.997, -0.496], abs=1e-6)

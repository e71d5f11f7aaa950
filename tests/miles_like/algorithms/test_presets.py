"""Every preset as one: rewards to advantages to packs to losses, with the seams between them.

What a step makes of a rollout must be one number in every layout, whatever stands in the rollout: groups that lost
samples, empty answers, truncated ones that are masked, episodes with an environment's tokens between. Each part alone
has its own file; here a preset's parts must fit one another. A table of log-probabilities stands for the model, so that
gradients of layouts can be compared. Not covered: the model, the loop (tests/e2e).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.algorithms.registry import make_algorithm, make_critic_loss
from miles_like.algorithms.truncation import make_overlong
from miles_like.batch.packer import Packer
from miles_like.config.sections.algorithm import PRESETS, AlgorithmConfig, RolloutAlgorithm
from miles_like.config.sections.correction import BOUNDS_OF, CorrectionConfig
from miles_like.config.sections.flat import names_of, parts_of
from miles_like.config.sections.watched.mismatch import MismatchConfig
from miles_like.experience.experience import Experience
from miles_like.types import Finish, LossInputs, SampleGroup, StepReport, TrainBatch
from tests.support.made_samples import group, sample

LOSSES = names_of(parts_of(RolloutAlgorithm)["loss"])
# presets that choose tokens within a micro-batch, as verl's do: test_verl_objectives.py
OF_MICRO_BATCHES = {"clip_cov", "kl_cov"}

TOKENS = 400  # of the table; no two samples share one
LIMIT = 12
SETTINGS: dict[str, dict[str, Any]] = {
    "bare": {},
    "masked": {"mask_truncated": True, "entropy_coefficient": 0.1},
}


def rollout() -> list[SampleGroup]:
    """Four prompts; one lost samples, one answer is empty, one cut, one an episode of two turns."""
    noise, out, first = torch.Generator().manual_seed(0), [], 0
    for p, lengths in enumerate([(4, 0, LIMIT, 3), (7,), (5, 2, 9), (6, 1)]):
        made = []
        for i, n in enumerate(lengths):
            cut = n == LIMIT
            s = sample(f"p{p}", i, response_len=n, first_token=first, reward=float((i + p) % 2))
            mask = s.loss_mask & (torch.arange(n + 2) % 4 != 0) if n == 9 else s.loss_mask
            far = 0.3 * torch.randn(n + 2, generator=noise)
            logprobs = torch.where(mask, table()[s.token_ids] + far, 0.0)
            made.append(replace(s, loss_mask=mask, logprobs=logprobs, finish=Finish.LENGTH if cut else Finish.STOP))
            first += n + 2
        out.append(group(made))
    return out


def table() -> Tensor:
    return -1 - torch.rand(TOKENS, generator=torch.Generator().manual_seed(1))


class Says:
    """Ranks that give every label the log-probability of a table."""

    def __init__(self, of: Tensor) -> None:
        self.of, self.trained = of, list[TrainBatch]()

    async def logprobs(self, batch: TrainBatch, *, weights: str | None = None) -> list[list[Tensor]]:
        return [[torch.where(m.loss_mask, self.of[m.labels], 0.0) for m in row] for row in batch.grid]

    async def train(self, batches: Sequence[TrainBatch]) -> StepReport:
        self.trained += batches
        return StepReport(version=1, metrics={})


def gradient(loss: Any, batches: Sequence[TrainBatch], ref: Tensor) -> tuple[float, Tensor]:
    """(sum of the steps' losses, its gradient by the table) as the trainer adds them up."""
    policy, total = table().requires_grad_(), torch.zeros(())
    for batch in batches:
        for m in (m for row in batch.grid for m in row):
            per_token, _ = loss(
                LossInputs(
                    logprobs=policy[m.labels],
                    entropy=-policy[m.labels],
                    rollout_logprobs=m.rollout_logprobs,
                    advantages=m.advantages,
                    loss_mask=m.loss_mask,
                    cu_seqlens=m.cu_seqlens,
                    ref_logprobs=ref[m.labels],
                    old_logprobs=(policy.detach() + 0.05 * (-1) ** torch.arange(TOKENS))[m.labels],
                    streams=m.streams,
                    candidate_logprobs=None,
                )
            )
            weighed = per_token if m.weights is None else per_token * m.weights
            total = total + torch.where(m.loss_mask, weighed, 0.0).sum() / batch.loss_tokens
    total.backward()
    assert policy.grad is not None
    return float(total.detach()), policy.grad


def step(
    config: AlgorithmConfig, correction: CorrectionConfig, *, steps: int, **how: Any
) -> list[tuple[float, Tensor]]:
    """Of the policy, and where there is one of the critic."""
    mismatch = MismatchConfig(kl_max=0.01, on_breach="down_weight")
    algorithm = make_algorithm(config, correction, mismatch)
    overlong = make_overlong(config.parts.overlong, LIMIT)
    groups = rollout() if overlong is None else [overlong.shape(g) for g in rollout()]
    ref, critic = table() + 0.1 * torch.sin(torch.arange(TOKENS)), Says(table() + 1)
    weigh: dict[str, Any] = {"aggregation": algorithm.aggregation, "constant": config.parts.constant(LIMIT)}
    packer = Packer(steps_per_rollout=steps, **how, **weigh)
    asked = Experience(
        algorithm=algorithm,
        packer=packer,
        trainer=Says(ref),  # type: ignore[arg-type]
        critic=critic,  # type: ignore[arg-type]
        mask_truncated=config.parts.mask_truncated,
    )
    scored = asyncio.run(asked.score(groups))
    batches = packer.steps(scored, asyncio.run(asked.advantages(0, scored)))
    asyncio.run(asked.learn(scored))
    out = [gradient(algorithm.loss, batches, ref)]
    if (of_values := make_critic_loss(config)) is not None:
        out.append(gradient(of_values, critic.trained, ref))
    assert config.has_critic == bool(critic.trained)
    return out


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", [name for name in PRESETS if name not in OF_MICRO_BATCHES])
def test_a_preset_is_one_number_in_every_layout(name: str, settings: str) -> None:
    config = AlgorithmConfig(name=name, **SETTINGS[settings])
    for steps in (1, 2):
        want = step(config, CorrectionConfig(), steps=steps, dp_size=1, max_tokens=400)
        for how in ({"dp_size": 1, "max_tokens": 14}, {"dp_size": 3, "max_tokens": 20, "micro_multiple": 2}):
            for (value, grad), (other, others) in zip(
                want, step(config, CorrectionConfig(), steps=steps, **how), strict=True
            ):
                assert other == pytest.approx(value, rel=1e-5, abs=1e-6) and math.isfinite(value)
                torch.testing.assert_close(others, grad, rtol=1e-5, atol=1e-7)
                assert grad.any()


@pytest.mark.parametrize("loss", LOSSES)
def test_every_advantage_loss_penalty_and_correction_fit_one_another(loss: str) -> None:
    """Any part can stand in the place of a preset's. Every pair of parts is there: of three losses one has a preset
    with a correction, and the penalty is in the loss of every second."""
    kinds = {kind: CorrectionConfig(kind=kind) for kind, *_ in BOUNDS_OF} | {"off": CorrectionConfig()}
    for i, name in enumerate(PRESETS):
        for j, (kind, correction) in enumerate(kinds.items()):
            kl_in = "loss" if (i + j + LOSSES.index(loss)) % 2 or name == "maxrl" else "reward"
            if ((i + j + LOSSES.index(loss)) % 3 and kind != "off") or (loss == "decoupled" and kind != "off"):
                continue
            config = AlgorithmConfig(name=name, loss=loss, kl_coefficient=0.1, kl_in=kl_in, kl_estimator="k3")
            for value, grad in step(config, correction, steps=1, dp_size=2, max_tokens=40):
                assert math.isfinite(value) and grad.isfinite().all() and grad.any(), (name, kl_in, kind)

"""What the code of advantages and losses costs of an optimizer step, for every preset, on one thread.

A step of 32 prompts x 8 samples with 12 response tokens each: the advantages of all groups, then of each pack the loss
with its statistics, forward and backward, as the trainer calls it, beside the whole step of the tiny model (1.1 M
parameters; with any larger one the share is smaller). Old log-probs are given, as in a rollout of several steps, and
what the preset needs: a reference, a critic's values, returns and the critic's loss. In seconds of processor time of
this thread, medians; a turn of each preset lies between two steps. Goal: <= 2 % of the step.

    python benchmarks/objectives.py [--quick]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from figures import add_write, finish
from rich.console import Console
from rich.table import Table
from torch import Tensor
from train_step import make_trainer, model_config

from megatron_bridge.config import ReplayConfig
from megatron_bridge.convert.to_megatron import to_megatron
from megatron_bridge.families.registry import family_of
from miles_like.algorithms.registry import make_algorithm, make_critic_loss
from miles_like.batch.packing import pack
from miles_like.config.sections.algorithm import PRESETS, AlgorithmConfig, PenaltyInLoss
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.hf.checkpoint import write_hf
from miles_like.pipeline.warmup import random_weights
from miles_like.protocols import LossFn
from miles_like.types import (
    REFERENCE,
    RETURNS,
    VALUES,
    Finish,
    LossInputs,
    MicroBatch,
    Prompt,
    Sample,
    SampleGroup,
    TrainBatch,
)
from rollout.sglang.ports import free_port
from routing_replay.versions import VersionSpan

GOALS = {"share_max": 0.02}
PROMPTS, SAMPLES, PROMPT_TOKENS, ANSWER_TOKENS = 32, 8, 7, 12
MAX_TOKENS = 8192
TOTAL = PROMPT_TOKENS + ANSWER_TOKENS
MASK = torch.arange(TOTAL) >= PROMPT_TOKENS
STREAMS = {REFERENCE: torch.where(MASK, -0.5, 0.0), VALUES: torch.where(MASK, 0.4, 0.0)}


def cpu_of(work: Callable[[], Any]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def rollout(vocabulary: int) -> list[SampleGroup]:
    """Groups as they come back."""
    g = torch.Generator().manual_seed(0)

    def sample(prompt: int, index: int) -> Sample:
        logprobs = torch.where(MASK, -torch.rand(TOTAL, generator=g), 0.0)
        return Sample(
            prompt_id=str(prompt),
            index=index,
            token_ids=torch.randint(2, vocabulary, (TOTAL,), generator=g),
            loss_mask=MASK,
            logprobs=logprobs,
            routing=None,
            versions=(VersionSpan(0, 0, ANSWER_TOKENS),),
            finish=Finish.STOP,
            text="",
            reward=float(torch.rand((), generator=g) < 0.4),
        )

    prompts = [Prompt(id=str(i), token_ids=tuple(range(2, 2 + PROMPT_TOKENS)), answer="1") for i in range(PROMPTS)]
    return [SampleGroup(prompt=p, samples=tuple(sample(i, j) for j in range(SAMPLES))) for i, p in enumerate(prompts)]


def with_streams(group: SampleGroup, streams: Sequence[Mapping[str, Tensor]]) -> SampleGroup:
    """More of them, for each sample."""
    pairs = zip(group.samples, streams, strict=True)
    return dataclasses.replace(
        group, samples=tuple(dataclasses.replace(s, streams={**s.streams, **more}) for s, more in pairs)
    )


class Objective:
    """One preset's code, as controller and trainer call it."""

    def __init__(self, preset: str, groups: Sequence[SampleGroup]) -> None:
        self.config = AlgorithmConfig.model_validate({"name": preset})
        self.algorithm = make_algorithm(self.config, CorrectionConfig())
        self.critic = make_critic_loss(self.config)
        needs = self.algorithm.needs
        self.groups = [with_streams(g, [{k: STREAMS[k] for k in needs}] * len(g.samples)) for g in groups]
        advantages, returns = self.algorithm.advantages(self.groups), self.algorithm.returns(self.groups)
        how: dict[str, Any] = {"aggregation": self.algorithm.aggregation, "constant": ANSWER_TOKENS}
        self.batch = pack(self.groups, advantages, dp_size=1, max_tokens=MAX_TOKENS, **how)
        self.of_critic: TrainBatch | None = None
        if returns is not None:
            with_returns = [
                with_streams(g, [{RETURNS: r} for r in of]) for g, of in zip(self.groups, returns, strict=True)
            ]
            self.of_critic = pack(with_returns, advantages, dp_size=1, max_tokens=MAX_TOKENS)

    def advantages(self) -> None:
        self.algorithm.advantages(self.groups)
        self.algorithm.returns(self.groups)

    def losses(self) -> None:
        reference = isinstance(self.config.parts.penalty, PenaltyInLoss)
        for batch in self.batch.grid[0]:
            of_loss(self.algorithm.loss, batch, self.batch.loss_tokens, reference=reference)
        if self.critic is not None and self.of_critic is not None:
            for batch in self.of_critic.grid[0]:
                of_loss(self.critic, batch, self.of_critic.loss_tokens, reference=False)


def of_loss(loss: LossFn, batch: MicroBatch, loss_tokens: int, *, reference: bool) -> Tensor:
    """What megatron_bridge/step/step.py makes of a pack, from the log-probs on and back to them."""
    logprobs = (batch.rollout_logprobs + 0.01).requires_grad_()
    per_token, _ = loss(
        LossInputs(
            logprobs=logprobs,
            entropy=F.softplus(logprobs),
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            cu_seqlens=batch.cu_seqlens,
            ref_logprobs=batch.rollout_logprobs - 0.01 if reference else None,
            old_logprobs=batch.rollout_logprobs - 0.005,
            streams=batch.streams,
            candidate_logprobs=None,
        )
    )
    if batch.weights is not None:
        per_token = per_token * batch.weights
    (torch.where(batch.loss_mask, per_token, 0.0).sum() / loss_tokens).backward()
    assert logprobs.grad is not None
    return logprobs.grad


def measure(turns: int, folder: Path) -> dict[str, float]:
    hf = model_config()
    shapes = {p.hf_name: p.shape for p in family_of(hf).bind(hf).places()}
    write_hf(folder / "hf", random_weights(shapes, hf, seed=0), hf)
    to_megatron(folder / "hf", folder / "megatron")
    trainer = make_trainer(folder, "float32", port=free_port(), replay=ReplayConfig(mode="off"))
    groups = rollout(hf["vocab_size"])
    objectives = {preset: Objective(preset, groups) for preset in PRESETS}
    [row], loss_tokens = objectives["grpo"].batch.grid, objectives["grpo"].batch.loss_tokens
    steps: list[float] = []
    seconds: dict[str, list[float]] = {preset: [] for preset in PRESETS}
    for turn in range(-2, turns):  # two warm both up
        step = cpu_of(lambda: trainer.step(row, loss_tokens, 1))
        steps += [step] * (turn >= 0)
        for preset, objective in objectives.items():
            took = cpu_of(objective.advantages) + cpu_of(objective.losses)
            seconds[preset] += [took] * (turn >= 0)
    trainer.close()
    whole = statistics.median(steps)
    shares = {f"share_{preset}": statistics.median(took) / whole for preset, took in seconds.items()}
    return {"step_s": whole, "share": max(shares.values()), **shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(8 if quick else 40, Path(folder))
    table = Table("preset", "share of the step", title=f"advantages and loss, of a step of {figures['step_s']:.3f} s")
    for preset in PRESETS:
        table.add_row(preset, f"{figures[f'share_{preset}']:.2%}")
    Console().print(table)
    holds = figures["share"] <= GOALS["share_max"]
    finish("objectives", figures, GOALS, holds)


if __name__ == "__main__":
    main()

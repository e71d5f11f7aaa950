"""Episodes of four turns, answered by environments that take 10 ms, beside the same tokens sampled in one turn.

The server is the embedded engine's on the tiny model, with its prefix cache. Each episode has TURNS turns of
TURN_TOKENS tokens, between which an environment waits ENVIRONMENT_S and says one token; the other way samples as many
tokens of the same prompts at once. Both are timed in turn, round by round; figures are medians of ratios within a
round.

- `throughput`: tokens sampled a second in episodes over those in one turn. Goal: 0.8.
- `cached`: of the tokens before a later turn, the share that the server had cached: `cached_tokens` of its reply.
- `blocking`: as `throughput`, with environments that are plain functions and block, in THREADS threads.

    python benchmarks/episodes.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from figures import add_write, finish
from rollout_throughput import Server, make_model

from miles_like.protocols import MakeEnvironment
from miles_like.types import Finish, Observation, Prompt, Sample, SampleGroup, SamplingParams
from rollout.episodes.environment import EpisodeLimits, Episodes
from rollout.episodes.resuming import ResumingEngine
from rollout.sglang.client import SGLangClient

TURNS, TURN_TOKENS, SAMPLES, ENVIRONMENT_S, THREADS = 4, 64, 8, 0.01, 16
GOALS = {"throughput_min": 0.8, "cached_min": 0.9}


class Waiting:
    """An environment that answers by one token."""

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        self.turn = 0

    async def __call__(self, sample: Sample, turn: str) -> Observation:
        await asyncio.sleep(ENVIRONMENT_S)
        return self.answer()

    def answer(self) -> Observation:
        self.turn += 1
        return Observation(ends=True, reward=0.0) if self.turn == TURNS else Observation(token_ids=(5,))


class Blocking:
    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        self.waiting = Waiting(prompt, seed=seed)

    def __call__(self, sample: Sample, turn: str) -> Observation:
        time.sleep(ENVIRONMENT_S)
        return self.waiting.answer()


class WholeTurns(ResumingEngine):
    """A turn that reaches its length counts as ended by the policy: random weights end none."""

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        groups = await super().generate(prompts, n=n, params=params)
        return [dataclasses.replace(g, samples=tuple(map(_ended, g.samples))) for g in groups]

    async def resume_turn(
        self, sample: Sample, params: SamplingParams, *, sampled_before: int = 0, environment: Sequence[int] = ()
    ) -> Sample:
        more = await super().resume_turn(sample, params, sampled_before=sampled_before, environment=environment)
        return _ended(more)


def _ended(sample: Sample) -> Sample:
    return dataclasses.replace(sample, finish=Finish.STOP)


def episodes_of(url: str, make: MakeEnvironment) -> Episodes:
    client = SGLangClient(url, routing=None, prompts_per_request=16)
    limits = EpisodeLimits(max_turns=TURNS, max_tokens=TURNS * (TURN_TOKENS + 1), threads=THREADS)
    return Episodes(WholeTurns(client), make, limits, encode=lambda text: (), decode=lambda ids: "")


async def sampled(engine: Any, prompts: Sequence[Prompt], tokens: int, seed: int) -> tuple[float, int, Sample]:
    """(seconds, tokens sampled, one of the samples)."""
    params = SamplingParams(max_new_tokens=tokens, sampling_seed=seed)
    began = time.perf_counter()
    groups = await engine.generate(prompts, n=SAMPLES, params=params)
    seconds = time.perf_counter() - began
    samples = [s for g in groups for s in g.samples]
    return seconds, sum(s.response_len for s in samples), samples[-1]


async def cached_share(url: str, sample: Sample) -> float:
    """Of a sample's tokens when its next turn is asked for."""
    ids = sample.token_ids.tolist()
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
        reply = (await http.post("/generate", json=body)).raise_for_status().json()
    return float(reply["meta_info"]["cached_tokens"]) / len(ids)


async def measure(url: str, prompts: Sequence[Prompt], rounds: int) -> dict[str, float]:
    ratios: dict[str, list[float]] = {"throughput": [], "blocking": [], "cached": []}
    plain = SGLangClient(url, routing=None, prompts_per_request=16)
    ways: dict[str, Any] = {"throughput": episodes_of(url, Waiting), "blocking": episodes_of(url, Blocking)}
    for k in range(rounds + 1):
        seconds, tokens, _ = await sampled(plain, prompts, TURNS * TURN_TOKENS, k)
        found: dict[str, float] = {}
        for name, engine in ways.items():
            took, sampled_tokens, one = await sampled(engine, prompts, TURN_TOKENS, k)
            found[name] = (sampled_tokens / took) / (tokens / seconds)
            found["cached"] = await cached_share(url, one)
        if k:  # the first round does not count
            for name, value in found.items():
                ratios[name].append(value)
    for closed in (plain, *ways.values()):
        await closed.close()
    return {name: statistics.median(values) for name, values in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    count, rounds = (16, 1) if given.quick else (64, 5)
    g = torch.Generator().manual_seed(0)
    drawn = torch.randint(2, 128, (count, 32), generator=g).tolist()
    prompts = [Prompt(id=f"p{i}", token_ids=tuple(ids), answer="") for i, ids in enumerate(drawn)]
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "model"
        make_model(path)
        with Server(path, max(1, (os.cpu_count() or 2) - 1), "--weight-version", "0") as server:
            figures = asyncio.run(measure(server.url, prompts, rounds))
    print(json.dumps(figures, indent=1))
    holds = figures["throughput"] >= GOALS["throughput_min"] and figures["cached"] >= GOALS["cached_min"]
    finish("episodes", figures, GOALS, holds)


if __name__ == "__main__":
    main()

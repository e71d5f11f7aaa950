"""A policy of fixed lines, and episodes that it plays with an environment in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams, VersionSpan
from rollout.episodes.environment import EpisodeLimits, Episodes
from rollout.episodes.resuming import ResumingEngine
from rollout.sglang.samples import empty_sample
from tests.support.fakes import FakeEngine, make_prompt

PROMPT = make_prompt("p", answer="24")
END = 0
PARAMS = SamplingParams(max_new_tokens=6, sampling_seed=5, stop_token_ids=(END,))


class Talker(FakeEngine):
    """Answers its lines in order, a letter a token, each with an end; what does not fit is cut. Records what it is fed.

    aborts: how often each turn comes back aborted, the first time before its first token, then with a token more.
    """

    def __init__(self, *lines: str, aborts: int = 0) -> None:
        super().__init__()
        self.lines, self.left = lines, {}  # type: ignore[var-annotated]
        self.aborts = aborts
        self.fed: list[tuple[str, int]] = []

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> list[SampleGroup]:
        self.asked += [p.id for p in prompts]
        return [
            SampleGroup(prompt=p, samples=tuple(self._turn(empty_sample(p, i), (), params) for i in range(n)))
            for p in prompts
        ]

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        self.fed.append((text_of(environment), params.max_new_tokens))
        return self._turn(sample, environment, params)

    def _turn(self, sample: Sample, fed: Sequence[int], params: SamplingParams) -> Sample:
        turn, done, tries = self.left.get(sample.name, (0, 0, 0))
        line = [*self.lines[turn].encode(), END][done:]
        cut = tries < self.aborts
        new = line[: min(tries, 1)] if cut else line[: params.max_new_tokens]
        goes_on = cut and new != line
        self.left[sample.name] = (turn, done + len(new), tries + 1) if goes_on else (turn + 1, 0, 0)
        if cut and not new:
            return replace(sample, finish=Finish.ABORT)
        s, n = len(sample.token_ids) + len(fed), len(new)
        first = len(PROMPT.token_ids)
        return replace(
            sample,
            token_ids=torch.cat([sample.token_ids, torch.tensor([*fed, *new], dtype=torch.int64)]),
            loss_mask=torch.cat([sample.loss_mask, torch.arange(len(fed) + n) >= len(fed)]),
            logprobs=torch.cat([sample.logprobs, torch.zeros(len(fed) + n)]),
            versions=(*sample.versions, VersionSpan(0, s - first, s - first + n)),
            finish=Finish.ABORT if cut else Finish.STOP if new[-1] == END else Finish.LENGTH,
        )


def text_of(ids: Sequence[int]) -> str:
    return bytes(i for i in ids if i != END).decode()


def played(
    engine: FakeEngine,
    make: Callable[..., Any],
    *,
    turns: int = 4,
    tokens: int = 60,
    n: int = 1,
    limit: float = 60,
    limits: dict[str, Any] | None = None,
    episodes: dict[str, Any] | None = None,
    **how: Any,
) -> list[Sample]:
    return list(played_group(engine, make, turns, tokens, n, limit, limits, episodes, **how).samples)


def played_group(
    engine: FakeEngine,
    make: Callable[..., Any],
    turns: int = 4,
    tokens: int = 60,
    n: int = 1,
    limit: float = 60,
    limits: dict[str, Any] | None = None,
    episodes: dict[str, Any] | None = None,
    **how: Any,
) -> SampleGroup:
    """limits, episodes: further arguments of `EpisodeLimits` and of `Episodes`; how: sampling parameters."""
    runner = Episodes(
        ResumingEngine(engine),
        make,
        EpisodeLimits(max_turns=turns, max_tokens=tokens, call_s=limit, **(limits or {})),
        encode=lambda text: list(text.encode()),
        decode=text_of,
        **(episodes or {}),
    )
    (group,) = asyncio.run(runner.generate([PROMPT], n=n, params=replace(PARAMS, **how)))
    return group


def transcript(sample: Sample) -> str:
    """Text of the policy and of the environment."""
    return text_of(sample.token_ids[len(PROMPT.token_ids) :].tolist())

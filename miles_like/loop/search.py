"""Test-time search by a reward: the best of N sampled answers, and beam search over steps, at the same budget.

A selector, which is a reward that knows no reference answer (a reward model, a judge), chooses one answer to each
prompt; the set's reward says what the choice is worth. docs/evaluation.md defines the figures.

Letters: N sampled answers a prompt, W beams.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from miles_like.protocols import RewardFn, RolloutEngine
from miles_like.report.metrics import powers_up_to
from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams, Score
from rollout.concurrency import all_or_first_error
from rollout.seeds import seed_of

_IN_FLIGHT = 256  # continuations: each is a request, and a server has room for so many connections


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """best_of: N. beams: W, None for no beam search. step_tokens: most tokens of a step of the beam search."""

    best_of: int
    by: str  # the name of the selector
    selector: RewardFn
    beams: int | None = None
    step_tokens: int = 16

    def __post_init__(self) -> None:
        if self.best_of < 2:
            raise ValueError(f"best of {self.best_of} answers leaves nothing to choose: use 2 or more answers")
        if self.beams is not None and not 1 <= self.beams <= self.best_of // 2:
            raise ValueError(
                f"{self.beams} beams of {self.best_of} answers: each beam needs at least 2 continuations: use 1 "
                f"to {self.best_of // 2} beams, or more answers"
            )

    @property
    def budgets(self) -> list[int]:
        """The numbers of answers at which the beam search is measured."""
        w = self.beams
        return [] if w is None else [n for n in powers_up_to(self.best_of) if n >= 2 * w and n % w == 0]


def best_of(scores: Sequence[float], rewards: Sequence[float], n: int) -> float:
    """The mean reward of the answer with the highest score among n of the answers, over all subsets of n; answers of
    equal score are chosen with equal probability. Raises ValueError unless 1 <= n <= len(scores)."""
    total = len(scores)
    if not 1 <= n <= total:
        raise ValueError(f"the best of {n} among {total} answers: expected 1 <= n <= {total}")
    out, above = 0.0, 0
    for score in sorted(set(scores), reverse=True):
        tied = [r for s, r in zip(scores, rewards, strict=True) if s == score]
        first = math.comb(total - above, n) - math.comb(total - above - len(tied), n)
        out += first / math.comb(total, n) * statistics.fmean(tied)
        above += len(tied)
    return out


def best_of_figures(groups: Sequence[SampleGroup], search: Search, name: str) -> dict[str, float]:
    """`eval/{name}/best@n` for n = 1, 2, 4, ... N and `eval/{name}/best_tokens`, of groups that `with_scores` returned.
    Answers without a reward or without a score count in neither; a prompt enters best@n with n such answers or more."""
    key = part_of(search.by)
    both = [
        [(s.reward_parts[key], s.reward) for s in g.samples if s.reward is not None and key in s.reward_parts]
        for g in groups
    ]
    out = {}
    for n in powers_up_to(search.best_of):
        found = [best_of([s for s, _ in pairs], [r for _, r in pairs], n) for pairs in both if len(pairs) >= n]
        if found:
            out[f"eval/{name}/best@{n}"] = statistics.fmean(found)
    out[f"eval/{name}/best_tokens"] = statistics.fmean(sum(s.response_len for s in g.samples) for g in groups)
    return out


async def with_scores(groups: Sequence[SampleGroup], search: Search) -> list[SampleGroup]:
    """The groups with the selector's score of each answer among its `reward_parts`. Raises as the selector."""
    prompts = [g.prompt for g in groups for _ in g.samples]
    scores = iter(await _scores(search.selector, prompts, [s for g in groups for s in g.samples]))

    def scored(s: Sample) -> Sample:
        score = next(scores)
        return (
            s if score is None else dataclasses.replace(s, reward_parts={**s.reward_parts, part_of(search.by): score})
        )

    return [dataclasses.replace(g, samples=tuple(scored(s) for s in g.samples)) for g in groups]


def part_of(selector: str) -> str:
    """The name of a selector's score in `reward_parts`."""
    return f"by/{selector.rpartition(':')[2]}"


@dataclass(slots=True)
class _Beams:
    """The candidates for the answer to one prompt."""

    prompt: Prompt
    live: list[Sample]
    kept: list[Sample] = field(default_factory=list)  # of the last selection, best first
    tokens: int = 0  # sampled

    def ended(self, limit: int) -> bool:
        return all(_has_ended(s, limit) for s in self.kept)


async def beam_search(
    engine: RolloutEngine, prompts: Sequence[Prompt], search: Search, *, budget: int, params: SamplingParams
) -> tuple[list[Sample], float]:
    """(the chosen answer to each prompt, mean number of tokens sampled for one).

    `budget` answers to each prompt are begun with a step. After each step the selector scores all of them, the W best
    that differ are kept (fewer if fewer differ), and each of these that has not ended is continued by different steps,
    budget / number of kept ones. When the kept ones have ended, the first is the answer. So at most `budget` answers
    are sampled at any time, and at most budget * params.max_new_tokens tokens, as for the best of `budget` answers.
    Candidates without a score are dropped unless none has one.
    """
    assert search.beams is not None
    limit, step = params.max_new_tokens, min(search.step_tokens, params.max_new_tokens)
    groups = await engine.generate(prompts, n=budget, params=dataclasses.replace(params, max_new_tokens=step))
    every = [_Beams(g.prompt, list(g.samples), tokens=sum(s.response_len for s in g.samples)) for g in groups]
    running, number, room = list(every), 0, asyncio.Semaphore(_IN_FLIGHT)
    while running:
        await _select(running, search)
        running = [b for b in running if not b.ended(limit)]
        number += 1
        seed = None if params.sampling_seed is None else seed_of(params.sampling_seed, f"beam {number}")
        of_step = dataclasses.replace(params, sampling_seed=seed)
        await all_or_first_error(_continue(engine, b, budget // len(b.kept), of_step, step, room) for b in running)
    return [b.kept[0] for b in every], statistics.fmean(b.tokens for b in every)


async def beam_figures(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    search: Search,
    reward: RewardFn,
    *,
    params: SamplingParams,
    name: str,
) -> dict[str, float]:
    """`eval/{name}/beam@n` and `eval/{name}/beam_tokens@n` for each budget n. Raises as the rewards."""
    out: dict[str, float] = {}
    for budget in search.budgets:
        chosen, tokens = await beam_search(engine, prompts, search, budget=budget, params=params)
        found = [r for r in await _scores(reward, prompts, chosen) if r is not None]
        if found:
            out[f"eval/{name}/beam@{budget}"] = statistics.fmean(found)
        out[f"eval/{name}/beam_tokens@{budget}"] = tokens
    return out


async def _select(running: Sequence[_Beams], search: Search) -> None:
    prompts = [b.prompt for b in running for _ in b.live]
    scores = iter(await _scores(search.selector, prompts, [s for b in running for s in b.live]))
    for b in running:
        worth: Mapping[int, float | None] = {i: next(scores) for i in range(len(b.live))}
        order = sorted(range(len(b.live)), key=lambda i: -math.inf if (w := worth[i]) is None else w, reverse=True)
        distinct: dict[tuple[int, ...], Sample] = {}
        for i in order:
            distinct.setdefault(tuple(b.live[i].token_ids.tolist()), b.live[i])
        b.kept = list(distinct.values())[: search.beams]


async def _continue(
    engine: RolloutEngine, b: _Beams, times: int, params: SamplingParams, step: int, room: asyncio.Semaphore
) -> None:
    """The next step of the kept candidates: those that have ended stay, of the others there are `times`."""
    sources = [s for s in b.kept for _ in range(1 if _has_ended(s, params.max_new_tokens) else times)]
    live = [dataclasses.replace(s, index=i) for i, s in enumerate(sources)]  # a random stream for each

    async def longer(s: Sample) -> Sample:
        if _has_ended(s, params.max_new_tokens):
            return s
        left = min(step, params.max_new_tokens - s.response_len)
        async with room:
            return await engine.continue_sample(s, params=dataclasses.replace(params, max_new_tokens=left))

    b.live = await all_or_first_error(longer(s) for s in live)
    b.tokens += sum(after.response_len - before.response_len for before, after in zip(live, b.live, strict=True))


def _has_ended(sample: Sample, limit: int) -> bool:
    return sample.finish is Finish.STOP or sample.response_len >= limit


async def _scores(reward: RewardFn, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[float | None]:
    return [s.value if isinstance(s, Score) else None for s in await reward(prompts, samples)]

"""Evaluation: answers of the rollout servers to held-out prompts, and their scores. docs/evaluation.md defines the
figures.

A set is answered greedily (one answer a prompt), sampled (`k` answers a prompt), or both; sets one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles_like import spans
from miles_like.config.sections.eval import EvalSet
from miles_like.loop.search import Search, beam_figures, best_of_figures, with_scores
from miles_like.protocols import RewardFn, RolloutEngine
from miles_like.report.metrics import brief, eval_metrics
from miles_like.report.paired.history import EvalHistory
from miles_like.report.progress import PhaseBar
from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams, ServerLost, Unit
from rollout.episodes.groups import run_groups
from rollout.episodes.pool import EnginePool
from rollout.episodes.runner import SINGLE_TURN, EpisodeRunner
from rollout.episodes.serving import Serving
from rollout.prompts.config import DataConfig
from rollout.prompts.mix import PromptSource
from rollout.prompts.source import Tokenizer
from rollout.seeds import seed_of


class Answering(Protocol):
    """Rollout workers, whose answers come without values of tokens (cluster.workers.pool.RolloutWorkers)."""

    async def answer(
        self, reward: str | None, prompts: Sequence[Prompt], *, n: int, params: SamplingParams
    ) -> Sequence[SampleGroup]:
        """As `run_groups`. reward: name of that of the set; None: the run's."""


class Examined(RolloutEngine, Protocol):
    """A RolloutEngine whose prefix cache can be emptied."""

    async def flush_cache(self) -> None:
        """Drops all cached keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A held-out set with its prompts."""

    config: EvalSet
    prompts: Sequence[Prompt]
    reward: RewardFn


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers to a set, in the order of its prompts."""

    config: EvalSet
    greedy: Sequence[SampleGroup]  # of one answer each; empty without greedy answers
    sampled: Sequence[SampleGroup]  # of config.sampled answers each
    searched: Mapping[str, float] = field(default_factory=dict)  # figures of a search by a selector

    def figures(self) -> dict[str, float]:
        """`eval/{set}/...`"""
        c, out = self.config, dict[str, float]()
        avg_1 = f"eval/{c.name}/avg@1"  # of the greedy answers if nothing is sampled
        greedy = "greedy" if self.sampled else "avg@1"
        for groups, k, alone in ((self.greedy, 1, greedy), (self.sampled, c.sampled, "sampled")):
            found = eval_metrics(groups, name=c.name, k=k) if groups else {}
            out |= {f"eval/{c.name}/{alone}" if key == avg_1 else key: value for key, value in found.items()}
        asked = len(self.greedy) + c.sampled * len(self.sampled)
        scored = sum(s.reward is not None for g in (*self.greedy, *self.sampled) for s in g.episodes)
        return out | {f"eval/{c.name}/unscored_frac": 1 - scored / asked, **self.searched}

    def lines(self, of: Callable[[SampleGroup, Sample], Mapping[str, object]]) -> Iterator[dict[str, object]]:
        """Each answer as a JSON object: its set, `mode` ("greedy" or "sampled"), and what `of` makes of it."""
        for mode, groups in (("greedy", self.greedy), ("sampled", self.sampled)):
            for g in groups:
                yield from ({"set": self.config.name, "mode": mode, **of(g, s)} for s in g.samples)


def held_out(
    sets: Sequence[EvalSet], data: DataConfig, tokenizer: Tokenizer, reward: Callable[[str | None], RewardFn]
) -> list[HeldOut]:
    """Reads the sets. reward: name -> reward; for None the run's. Raises ValueError naming file and row, or the
    reward."""
    out = []
    for s in sets:
        worth = reward(s.reward)
        prompts = PromptSource(data, tokenizer, s.path, compared_by=worth.compares).all()[: s.max_prompts]
        out.append(HeldOut(config=s, prompts=prompts, reward=worth))
    return out


async def answers(
    engines: Sequence[Examined],
    held: HeldOut,
    *,
    params: SamplingParams,
    version: int,
    alone: bool,
    runner: EpisodeRunner = SINGLE_TURN,
    serving: Serving | None = None,
    search: Search | None = None,
    workers: Answering | None = None,
) -> Answers:
    """Samples answers from the whole distribution at the set's temperature, greedily, or both, as the set is
    configured.

    params: defaults of temperature and length for a set that does not set them. alone: no other request is in flight,
    and the engines drop their prefix caches afterwards: which prefixes are cached changes last bits of the next
    rollout, so a resumed run and one that never stopped must start from the same cache. runner: the run's, so that a
    model is evaluated in the episodes that it is trained in. serving: as of EnginePool. search: choose among the
    sampled answers, and sample others by beams. workers: answer instead of this process, except where the set's reward
    scores all answers at once. Raises RuntimeError for an answer with a token of another weight version than
    `version`.
    """
    c, engine = held.config, runner.wrap(EnginePool(engines, serving))
    asked = dataclasses.replace(
        params,
        temperature=params.temperature if c.temperature is None else c.temperature,
        max_new_tokens=params.max_new_tokens if c.max_new_tokens is None else c.max_new_tokens,
        top_p=1.0,
        top_k=-1,
    )

    async def ask(n: int, params: SamplingParams) -> list[SampleGroup]:
        if n and workers is not None and held.reward.unit is not Unit.BATCH:
            groups = list(await workers.answer(c.reward, held.prompts, n=n, params=params))
        else:
            groups = await run_groups(engine, held.prompts, held.reward, n=n, params=params) if n else []
        _check_versions(groups, version, c.name)
        return groups

    greedy = await ask(int(c.greedy), dataclasses.replace(asked, temperature=0.0))
    sampled, searched = await ask(c.sampled, asked), dict[str, float]()
    if search is not None:
        sampled = await with_scores(sampled, search)
        searched = best_of_figures(sampled, search, c.name)
        searched |= await beam_figures(engine, held.prompts, search, held.reward, params=asked, name=c.name)
    if alone:
        for e in engines:
            try:
                if serving is None or e in serving:
                    await e.flush_cache()
            except ServerLost:
                if serving is None:
                    raise
    return Answers(config=c, greedy=greedy, sampled=sampled, searched=searched)


async def evaluate(
    engines: Sequence[Examined],
    sets: Sequence[HeldOut],
    *,
    params: SamplingParams,
    version: int,
    alone: bool,
    runner: EpisodeRunner = SINGLE_TURN,
    serving: Serving | None = None,
    workers: Answering | None = None,
    history: EvalHistory | None = None,
) -> dict[str, float]:
    """`eval/{set}/...` of all sets at a weight version; arguments and errors as in `answers`. Empty without sets.
    history: gets all answers, and compares them with earlier ones."""
    out, lines = dict[str, float](), list[dict[str, object]]()
    for held in sets:
        how: dict[str, Any] = {"alone": alone, "runner": runner, "serving": serving, "workers": workers}
        found = await answers(engines, held, params=params, version=version, **how)
        out |= found.figures()
        lines += found.lines(brief)
    return out | (history.add(version, lines) if history is not None and sets else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Evaluates published weights on the held-out sets of a run, which `engines` answer.

    every: steps between two evaluations, besides those before the first and after the last step; 0: never. seed: of
    the run. alone, runner, serving, workers: as in `answers`; history: as in `evaluate`.
    """

    engines: Sequence[Examined]
    sets: Sequence[HeldOut]
    params: SamplingParams
    seed: int
    alone: bool
    every: int
    progress: PhaseBar
    runner: EpisodeRunner = SINGLE_TURN
    serving: Serving | None = None
    workers: Answering | None = None
    history: EvalHistory | None = None  # None: answers are not kept

    def due(self, step: int, *, last: bool) -> bool:
        """Whether weights are evaluated after `step` steps."""
        return bool(self.every) and (last or step % self.every == 0)

    async def figures(self, version: int) -> dict[str, float]:
        """`eval/{set}/...` of the weights on the servers, which must be `version`; empty with `every` = 0. Raises as
        `answers`."""
        if not self.every:
            return {}
        self.progress.phase(version, "evaluate")
        params = dataclasses.replace(self.params, sampling_seed=seed_of(self.seed, f"eval {version}"))
        with spans.span("evaluate", version=version):
            return await evaluate(
                self.engines,
                self.sets,
                params=params,
                version=version,
                alone=self.alone,
                runner=self.runner,
                serving=self.serving,
                workers=self.workers,
                history=self.history,
            )


def _check_versions(groups: Sequence[SampleGroup], version: int, name: str) -> None:
    for s in (s for g in groups for s in g.samples):
        others = sorted({v.version for v in s.versions} - {version})
        if others:
            raise RuntimeError(
                f"eval set {name!r} must be answered by weight version {version}, but {s.name} has tokens of "
                f"version {', '.join(map(str, others))}: make sure that no other process publishes weights to the "
                "servers"
            )

"""Samples and scores the groups of a run's rounds."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from rich.console import Console

from miles_like.protocols import Algorithm, EpisodeLog, RewardFn, RolloutEngine
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.types import GREEDY, Prompt, SampleGroup
from rollout.episodes.greedy import GreedyFirst, greedy_seed
from rollout.episodes.groups import groups_as_completed
from rollout.episodes.partial import PartialRollouts
from rollout.episodes.runner import EpisodeRunner


def answering(
    runner: EpisodeRunner, engine: RolloutEngine, algorithm: Algorithm, log: EpisodeLog | None = None
) -> RolloutEngine:
    """The engine that makes the samples of a run; `engine` samples their tokens. log: as of `EpisodeRunner.wrap`."""
    episodes = runner.wrap(engine, log)
    return GreedyFirst(episodes) if GREEDY in algorithm.needs else episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSampler:
    """The GroupSampler of a run: rollout servers sample, the run's reward scores."""

    rollout: RolloutSide
    engine: RolloutEngine
    partial: PartialRollouts
    reward: RewardFn
    console: Console
    complete: Callable[[SampleGroup], None] = lambda group: None  # called with each group when it is complete

    async def groups(
        self, round_index: int, prompts: Sequence[Prompt]
    ) -> AsyncGenerator[tuple[int, SampleGroup], None]:
        """Yields (index of the prompt, its scored group) when the group is complete."""
        c, params = self.rollout.plan.config, self.rollout.sampling(round_index)
        seed = params.sampling_seed
        if seed is None:
            raise RuntimeError("sampling needs a seed, so that checkpoints can identify the samples in flight")
        groups = groups_as_completed(
            self.engine,
            prompts,
            self.reward,
            n=c.train.samples_per_group,
            params=params,
            resumes=self.rollout.resumes,
            prompt_per_request=c.groups_end_by_themselves,
        )
        discarded = Counter[str]()
        try:
            async with contextlib.aclosing(groups):
                async for place, group in groups:
                    discarded += Counter(group.discarded)
                    self._forget(seed, group.prompt.id)  # so that no checkpoint holds the group twice
                    self.complete(group)
                    yield place, group
        finally:
            for p in prompts:
                self._forget(seed, p.id)
            for reason, n in discarded.most_common():
                self.console.print(
                    f"Round {round_index}: {n} samples discarded: {reason}", markup=False, soft_wrap=True
                )

    def _forget(self, seed: int, prompt_id: str) -> None:
        for one in (seed, greedy_seed(seed)):
            self.partial.forget(one, prompt_id)

    async def abort(self) -> None:
        await self.engine.abort_all()

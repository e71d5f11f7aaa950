"""Choice of the episode runner: single-turn sampling, episodes with an environment, or a user's generate function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from miles_like.plugins import load
from miles_like.protocols import GenerateFn, MakeEnvironment, RolloutEngine
from rollout.config import RolloutConfig
from rollout.episodes.custom_generate import CustomGenerate
from rollout.episodes.environment import EpisodeLimits, Episodes
from rollout.episodes.resuming import RESUMES, ResumingEngine
from rollout.prompts.source import Tokenizer

EpisodeRunner: TypeAlias = Callable[[RolloutEngine], RolloutEngine]


def make_episode_runner(config: RolloutConfig, tokenizer: Tokenizer, *, resumes: int = RESUMES) -> EpisodeRunner:
    """A function that wraps an engine so that its samples are made by the configured runner.

    Raises ValueError for an import path that cannot be used.
    """
    if config.environment is not None:
        make: MakeEnvironment = load(config.environment, MakeEnvironment, key="rollout.environment")
        limits = EpisodeLimits(max_turns=config.turns, max_tokens=config.longest_answer, call_s=config.call_timeout_s)
        return lambda engine: Episodes(
            ResumingEngine(engine, resumes),
            make,
            limits,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
            decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        )
    if config.generate is not None:
        function: GenerateFn = load(config.generate, GenerateFn, key="rollout.generate")
        return lambda engine: CustomGenerate(
            ResumingEngine(engine, resumes), function, max_tokens=config.longest_answer, call_s=config.call_timeout_s
        )
    return lambda engine: engine

"""How a run makes samples of prompts: in one turn, in an environment's episodes, or by a user's own function."""

from __future__ import annotations

from collections.abc import Callable

from miles_like.by_import_path import load
from miles_like.protocols import GenerateFn, MakeEnvironment, RolloutEngine
from rollout.config import RolloutConfig
from rollout.environment import EpisodeLimits, Episodes
from rollout.own_generate import OwnGenerate
from rollout.source import Tokenizer
from rollout.unaborted import RESUMES, Unaborted


def make_play(
    config: RolloutConfig, tokenizer: Tokenizer, *, resumes: int = RESUMES
) -> Callable[[RolloutEngine], RolloutEngine]:
    """What is put around the engines of a run, so that their samples are what the configuration asks for.

    Raises ValueError for an import path that cannot be used.
    """
    if config.environment is not None:
        assert config.max_turns is not None and config.max_episode_tokens is not None, "the configuration asks for them"
        make: MakeEnvironment = load(config.environment, MakeEnvironment, key="rollout.environment")
        limits = EpisodeLimits(
            max_turns=config.max_turns, max_tokens=config.max_episode_tokens, call_s=config.call_timeout_s
        )
        return lambda engine: Episodes(
            Unaborted(engine, resumes),
            make,
            limits,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
            decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        )
    if config.generate is not None:
        function: GenerateFn = load(config.generate, GenerateFn, key="rollout.generate")
        how = {"max_tokens": config.longest_answer, "call_s": config.call_timeout_s}
        return lambda engine: OwnGenerate(Unaborted(engine, resumes), function, **how)
    return lambda engine: engine

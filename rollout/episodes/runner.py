"""Episode runners: single-turn sampling, episodes with an environment, or a user's generate function."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from miles_like.hf.checkpoint import generation_eos
from miles_like.plugins import load
from miles_like.protocols import EpisodeLog, GenerateFn, MakeEnvironment, RolloutEngine
from rollout.chat.choose import AUTO, make_chat
from rollout.chat.messages import Messages
from rollout.chat.turns import Chat
from rollout.config import RolloutConfig
from rollout.episodes.agents import AgentEpisodes
from rollout.episodes.custom_generate import CustomGenerate
from rollout.episodes.environment import EpisodeLimits, Episodes
from rollout.episodes.resuming import RESUMES, ChatEngine, ResumingEngine
from rollout.prompts.source import Tokenizer
from rollout.recorder.agents import AgentFn, load_agent
from rollout.recorder.server import Recorder
from rollout.tools.environment import MakeToolEnvironment
from rollout.tools.load import Tools, load_tools


class EpisodeRunner(Protocol):
    """How a run makes the samples of its prompts."""

    def wrap(self, engine: RolloutEngine, log: EpisodeLog | None = None) -> RolloutEngine:
        """An engine whose samples are whole episodes; `engine` samples their tokens. log: counts what is replayed,
        and what agents ask."""


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """One answer a sample: the engine as it is."""

    def wrap(self, engine: RolloutEngine, log: EpisodeLog | None = None) -> RolloutEngine:
        return engine


SINGLE_TURN = SingleTurn()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentEpisodes:
    """Turns of model and environment (rollout.environment, rollout.tools). resumes: how often an aborted turn is
    continued. timed: spans have seconds. messages: None: the environment answers with text. tools: that are closed with
    the engine."""

    make: MakeEnvironment
    limits: EpisodeLimits
    tokenizer: Tokenizer
    resumes: int = RESUMES
    timed: bool = True
    messages: Messages | None = None
    tools: Tools | None = None

    def wrap(self, engine: RolloutEngine, log: EpisodeLog | None = None) -> RolloutEngine:
        turns = ResumingEngine(engine, self.resumes)
        if self.messages is not None:
            close = None if self.tools is None else self.tools.close
            turns = ChatEngine(engine, self.resumes, self.messages.chat.stop_token_ids, close)
        return Episodes(
            turns,
            self.make,
            self.limits,
            encode=lambda text: self.tokenizer.encode(text, add_special_tokens=False),
            decode=lambda ids: str(self.tokenizer.decode(ids, skip_special_tokens=True)),
            chat=self.messages,
            clock=time.perf_counter if self.timed else lambda: 0.0,
            log=log,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedEpisodes:
    """Samples of a user's function (rollout.generate). max_tokens: after the prompt. call_s: seconds that one call of
    the function may take. resumes: how often an aborted generation is continued."""

    function: GenerateFn
    max_tokens: int
    call_s: float
    resumes: int = RESUMES

    def wrap(self, engine: RolloutEngine, log: EpisodeLog | None = None) -> RolloutEngine:
        return CustomGenerate(
            ResumingEngine(engine, self.resumes), self.function, max_tokens=self.max_tokens, call_s=self.call_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEpisodes:
    """Episodes that an agent plays (rollout.agent). max_tokens: after the prompt. timeout_s: of an episode."""

    agent: AgentFn
    chat: Chat
    max_tokens: int
    timeout_s: float
    resumes: int = RESUMES
    recorder: Recorder = field(default_factory=Recorder)  # of training and of evaluations

    def wrap(self, engine: RolloutEngine, log: EpisodeLog | None = None) -> RolloutEngine:
        turns = ChatEngine(engine, self.resumes, self.chat.stop_token_ids)
        return AgentEpisodes(
            turns,
            self.agent,
            self.chat,
            max_tokens=self.max_tokens,
            timeout_s=self.timeout_s,
            recorder=self.recorder,
            log=log,
        )


def make_episode_runner(
    config: RolloutConfig, tokenizer: Tokenizer, *, resumes: int = RESUMES, timed: bool = True
) -> EpisodeRunner:
    """The configured runner. timed: spans of episodes have seconds, with which two runs of the same bits differ. Raises
    ValueError for an import path, tools or a renderer that cannot be used."""
    if config.turns_with is not None:
        messages, tools = make_messages(config, tokenizer), None
        if config.environment is not None:
            make: MakeEnvironment = load(config.environment, MakeEnvironment, key="rollout.environment")
        else:
            assert messages is not None, "tools answer by messages"
            tools = load_tools(config.tools)
            make = MakeToolEnvironment(tools.for_episode, messages.chat)
        limits = EpisodeLimits(
            max_turns=config.turns,
            max_tokens=config.longest_answer,
            call_s=config.call_timeout_s,
            environment_s=config.environment_timeout_s,
            episode_s=config.episode_timeout_s,
            threads=config.environment_threads,
        )
        return EnvironmentEpisodes(
            make=make,
            limits=limits,
            tokenizer=tokenizer,
            resumes=resumes,
            timed=timed,
            messages=messages,
            tools=tools,
        )
    if config.agent.given:
        chat = make_messages(config, tokenizer)
        assert chat is not None, "an agent talks by messages"
        return RecordedEpisodes(
            agent=load_agent(config.agent),
            chat=chat.chat,
            max_tokens=config.longest_answer,
            timeout_s=config.agent.timeout_s,
            resumes=resumes,
        )
    if config.generate is not None:
        function: GenerateFn = load(config.generate, GenerateFn, key="rollout.generate")
        return GeneratedEpisodes(
            function=function, max_tokens=config.longest_answer, call_s=config.call_timeout_s, resumes=resumes
        )
    return SINGLE_TURN


def make_messages(config: RolloutConfig, tokenizer: Any) -> Messages | None:
    """The configured messages; None: environments answer with text. Raises ValueError for a renderer or tools that
    cannot be used, and for a template that does not append the answers of tools."""
    if config.renderer is None and not (config.tools.given or config.agent.given):
        return None
    full = getattr(tokenizer, "full", tokenizer)  # `LazyTokenizer` has one
    directory = Path(str(getattr(full, "name_or_path", "")))
    stops = (generation_eos(directory) if directory.is_dir() else None) or ()
    specs = load_tools(config.tools).specs if config.tools.given else ()
    messages = Messages(make_chat(config.renderer or AUTO, full, stops, calls=bool(specs)), specs)
    if specs:
        messages.check("tool")
    return messages

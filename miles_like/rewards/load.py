"""Makes a run's rewards: the built-in ones from a dict, users' functions from import paths."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import assert_never

from miles_like.config.sections.reward import (
    BUILT_IN,
    BuiltIn,
    EndpointConfig,
    ExactConfig,
    ExactNumber,
    FormatConfig,
    FunctionReward,
    Gsm8k,
    JudgeConfig,
    LengthConfig,
    LocalRewardModelConfig,
    MultipleChoiceConfig,
    NoReward,
    RegexConfig,
    RemoteConfig,
    RewardConfig,
    RewardModelConfig,
    UnitTestsConfig,
)
from miles_like.config.sections.reward import MathVerify as MathVerifyConfig
from miles_like.limits.threads import DaemonThreads
from miles_like.plugins import is_async, load
from miles_like.protocols import BatchReward, RewardFn, RewardLog, SampleReward
from miles_like.rewards.form import Format, Length, none
from miles_like.rewards.function import adapt
from miles_like.rewards.judges.judge import Judge
from miles_like.rewards.judges.local_model import LocalRewardModel
from miles_like.rewards.judges.remote import Remote
from miles_like.rewards.judges.reward_model import RewardModel
from miles_like.rewards.maths.answers import Exact, MultipleChoice, Regex, exact_number, gsm8k
from miles_like.rewards.maths.math_verify import MathVerify
from miles_like.rewards.scorer import Limits, Scorer
from miles_like.rewards.unit_tests import UnitTests
from miles_like.rewards.weighted import Weighted
from miles_like.sandbox.config import NO_SANDBOX, SandboxConfig
from miles_like.types import Unit

LOCAL_S, MODEL_S, PROGRAM_S, REMOTE_S = 10.0, 600.0, 600.0, 60.0  # time limits where the configuration has none
REMOTE_RETRIES, CALLS, WAIT_S, CLOSE_S = 2, 64, 1.0, 10.0
OUTAGE_S = 600.0  # reward.outage_s of a run

Function = Callable[..., object]


class Rewards:
    """The run's reward, and other rewards that evaluation sets name. They are closed together."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        sandbox: SandboxConfig = NO_SANDBOX,
        outage_s: float = 0.0,
        log: RewardLog | None = None,
    ) -> None:
        """sandbox: where programs of the model run. outage_s: reward.outage_s where the configuration has none. log:
        counts the calls of all of them."""
        if config.outage_s is None:
            config = config.model_copy(update={"outage_s": outage_s})
        self._config, self._sandbox, self.log = config, sandbox, log
        self._made: dict[str | None, RewardFn] = {None: make_reward(config, log, sandbox=sandbox)}

    def __call__(self, name: str | None) -> RewardFn:
        """The reward `name`; None: the run's. Raises ValueError as `make_reward` does."""
        if name not in self._made:
            self._made[name] = make_reward(self._config.named(str(name)), self.log, sandbox=self._sandbox)
        return self._made[name]

    async def close(self) -> None:
        for reward in self._made.values():
            await reward.close()


def make_reward(config: RewardConfig, log: RewardLog | None = None, *, sandbox: SandboxConfig = NO_SANDBOX) -> RewardFn:
    """The configuration's reward, or the weighted sum of its parts. log: counts their calls.

    Raises ValueError for an unknown name (with the nearest), for an import path without a callable, and for a reward
    that runs programs without a sandbox.
    """
    made = {name: _one(name, config, sandbox) for name in config.weights}
    for scorer in made.values():
        scorer.log = log
    if not config.parts:
        return next(iter(made.values()))
    labels = [name.rpartition(":")[2] for name in made]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ValueError(f"reward.parts has two functions named {twice!r}: rename one of them")
    return Weighted({label: (made[name], config.weights[name]) for label, name in zip(labels, made, strict=True)})


def scored_by(function: Function, config: RewardConfig | None = None, *, label: str = "the reward") -> Scorer:
    """A user's function as a RewardFn. An async function is assumed to be slow.

    Raises ValueError where its style cannot be determined.
    """
    c = config or RewardConfig()
    threads = DaemonThreads()
    unit = None if c.unit is None else Unit(c.unit)
    call, unit = adapt(function, label=label, style=c.style, unit=unit, args=c.args, threads=threads)
    limits = _limits(c, REMOTE_S, REMOTE_RETRIES)
    return Scorer(call=call, unit=unit, slow=is_async(function), end=partial(_end, function, threads), limits=limits)


def _one(name: str, config: RewardConfig, sandbox: SandboxConfig) -> Scorer:
    key, reward = "reward.parts" if config.parts else "reward.name", config.part(name)
    if isinstance(reward, FunctionReward):
        function = load(name, key=key, known=BUILT_IN)
        return scored_by(function, config, label=f"{key} {name!r}")
    return _built_in(name, reward, config, sandbox)


def _built_in(name: str, reward: BuiltIn, config: RewardConfig, sandbox: SandboxConfig) -> Scorer:
    function, remote = _function(reward, config.timeout_s or LOCAL_S, sandbox), isinstance(reward, EndpointConfig)
    programs = isinstance(reward, UnitTestsConfig)
    limits = Limits()
    if programs:
        limits = _limits(config, PROGRAM_S, REMOTE_RETRIES)
    elif remote:
        limits = replace(_limits(config, REMOTE_S, REMOTE_RETRIES), outage_s=config.outage_s or 0.0)
    elif isinstance(reward, LocalRewardModelConfig):
        limits = _limits(config, MODEL_S, 0)
    elif reward.reads:  # these functions enforce the time limit themselves
        limits = replace(_limits(config, None, 0), timeout_s=None)
    threads = DaemonThreads()
    unit = Unit.BATCH if isinstance(reward, LocalRewardModelConfig) else Unit.SAMPLE  # several texts a forward pass
    call, unit = adapt(function, label=name, style="own", unit=unit, threads=threads)
    return Scorer(
        call=call,
        unit=unit,
        slow=remote or programs,
        compares=name if reward.compares else None,
        limits=limits,
        end=partial(_end, function, threads),
        spent=function.spent if isinstance(function, Judge) else lambda: 0,
    )


def _function(reward: BuiltIn, limit_s: float, sandbox: SandboxConfig) -> SampleReward | BatchReward:
    """limit_s: of a call that may take unbounded time."""
    match reward:
        case ExactNumber():
            return exact_number
        case ExactConfig():
            return Exact(reward)
        case Gsm8k():
            return gsm8k
        case MathVerifyConfig():
            return MathVerify(limit_s=limit_s)
        case MultipleChoiceConfig():
            return MultipleChoice(reward)
        case RegexConfig():
            return Regex(reward, limit_s=limit_s)
        case FormatConfig():
            return Format(reward, limit_s=limit_s)
        case LengthConfig():
            return Length(reward)
        case RemoteConfig():
            return Remote(reward)
        case RewardModelConfig():
            return RewardModel(reward)
        case LocalRewardModelConfig():
            return LocalRewardModel(reward)
        case JudgeConfig():
            return Judge(reward)
        case UnitTestsConfig():
            return UnitTests(reward, sandbox)
        case NoReward():
            return none
        case _:
            assert_never(reward)


def _limits(c: RewardConfig, timeout_s: float | None, retries: int) -> Limits:
    return Limits(
        timeout_s=c.timeout_s or timeout_s,
        retries=retries if c.retries is None else c.retries,
        retry_wait_s=WAIT_S if c.retry_wait_s is None else c.retry_wait_s,
        concurrency=c.concurrency or CALLS,
    )


async def _end(function: Function, threads: DaemonThreads) -> None:
    """Calls the function's `async def close()`, if it has one, for at most CLOSE_S."""
    threads.close()
    close = getattr(function, "close", None)
    if inspect.iscoroutinefunction(close):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await close()

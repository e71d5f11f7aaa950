"""Rewards by name: a dict of those that are built in, and import paths for the user's own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from miles_like.by_import_path import load
from miles_like.protocols import RewardFn, SampleReward
from miles_like.reward_config import BUILT_IN, LOCAL_BUT_SLOW, REMOTE, RewardConfig
from miles_like.rewards.answers import Exact, MultipleChoice, Regex, exact_number, gsm8k
from miles_like.rewards.function import calling, is_async
from miles_like.rewards.judge import Judge
from miles_like.rewards.math_verify import MathVerify
from miles_like.rewards.remote import Remote
from miles_like.rewards.reward_model import RewardModel
from miles_like.rewards.scorer import Scorer
from miles_like.rewards.shape import Format, Length, none
from miles_like.rewards.threads import DaemonThreads
from miles_like.rewards.weighted import Weighted
from miles_like.types import Unit

LOCAL_S, REMOTE_S = 10.0, 60.0  # time limits where the configuration has none
REMOTE_RETRIES, CALLS, WAIT_S, CLOSE_S = 2, 64, 1.0, 10.0

T = TypeVar("T")
Function = Callable[..., object]
# (configuration, time limit) -> the function; the configuration has its options, as RewardConfig sees to
REWARDS: dict[str, Callable[[RewardConfig, float], SampleReward]] = {
    "exact_number": lambda c, limit_s: exact_number,
    "exact": lambda c, limit_s: Exact(_given(c.exact)),
    "gsm8k": lambda c, limit_s: gsm8k,
    "math_verify": lambda c, limit_s: MathVerify(limit_s=limit_s),
    "multiple_choice": lambda c, limit_s: MultipleChoice(_given(c.multiple_choice)),
    "regex": lambda c, limit_s: Regex(_given(c.regex), limit_s=limit_s),
    "format": lambda c, limit_s: Format(_given(c.format), limit_s=limit_s),
    "length": lambda c, limit_s: Length(_given(c.length)),
    "remote": lambda c, limit_s: Remote(_given(c.remote)),
    "reward_model": lambda c, limit_s: RewardModel(_given(c.reward_model)),
    "judge": lambda c, limit_s: Judge(_given(c.judge)),
    "none": lambda c, limit_s: none,
}
assert REWARDS.keys() == BUILT_IN.keys()


class Rewards:
    """The run's own reward, and others by name that sets of an evaluation ask for. They are ended together."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._made: dict[str | None, RewardFn] = {None: make_reward(config)}

    def __call__(self, name: str | None) -> RewardFn:
        """None: the run's own. Raises ValueError as `make_reward`."""
        if name not in self._made:
            self._made[name] = make_reward(self._config.named(str(name)))
        return self._made[name]

    async def close(self) -> None:
        for reward in self._made.values():
            await reward.close()


def make_reward(config: RewardConfig) -> RewardFn:
    """The configuration's reward, or the weighted sum of its parts.

    Raises ValueError for an unknown name (with the nearest), and for an import path where there is nothing to call.
    """
    made = {name: _one(name, config) for name in config.weights}
    if not config.parts:
        return next(iter(made.values()))
    labels = [name.rpartition(":")[2] for name in made]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ValueError(f"reward.parts has {twice!r} twice: give one of the functions another name")
    return Weighted({label: (made[name], config.weights[name]) for label, name in zip(labels, made, strict=True)})


def scored_by(function: Function, config: RewardConfig | None = None, *, said: str = "the reward") -> Scorer:
    """A function of the user's as a RewardFn. One that is async waits for something, and is taken to be slow.

    Raises ValueError where nothing says how it is called.
    """
    c = config or RewardConfig()
    threads = DaemonThreads()
    unit = None if c.unit is None else Unit(c.unit)
    ask, unit = calling(function, said=said, style=c.style, unit=unit, args=c.args, threads=threads)
    patience = _patience(c, REMOTE_S, REMOTE_RETRIES)
    return Scorer(ask=ask, unit=unit, slow=is_async(function), end=partial(_ended, function, threads), **patience)


def _one(name: str, config: RewardConfig) -> Scorer:
    key, limit_s = "reward.parts" if config.parts else "reward.name", config.timeout_s or LOCAL_S
    function = load(name, key=key, known={n: partial(make, config, limit_s) for n, make in REWARDS.items()})
    if name not in REWARDS:
        return scored_by(function, config, said=f"{key} {name!r}")
    threads = DaemonThreads()
    ask, unit = calling(function, said=name, style="own", unit=Unit.SAMPLE, threads=threads)
    end = partial(_ended, function, threads)
    made = partial(Scorer, ask=ask, unit=unit, compares=name if config.compares(name) else None, end=end)
    if name in REMOTE:
        return made(slow=True, **_patience(config, REMOTE_S, REMOTE_RETRIES))
    if name in LOCAL_BUT_SLOW:  # they keep the limit themselves
        return made(**_patience(config, None, 0) | {"timeout_s": None})
    return made()


def _patience(c: RewardConfig, limit_s: float | None, retries: int) -> dict[str, Any]:
    return {
        "timeout_s": c.timeout_s or limit_s,
        "retries": retries if c.retries is None else c.retries,
        "retry_wait_s": WAIT_S if c.retry_wait_s is None else c.retry_wait_s,
        "concurrency": c.concurrency or CALLS,
    }


def _given(options: T | None) -> T:
    assert options is not None, "RewardConfig has the options of what it names"
    return options


async def _ended(function: Function, threads: DaemonThreads) -> None:
    """A function that keeps something open has an `async def close()`; one that hangs does not hold up the end."""
    threads.close()
    close = getattr(function, "close", None)
    if inspect.iscoroutinefunction(close):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await close()

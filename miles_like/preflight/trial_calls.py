"""Call each of the user's plug-ins once on a row before the run begins.

The arguments are made from the row: its answer as every response, rewards 1 and 0, constant log-probabilities. A
plug-in that raises on these would raise in the run.

Letters: G samples a prompt, S tokens a sample, T packed tokens.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import sysconfig
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from miles_like.check_results import NotCheckedError
from miles_like.protocols import Algorithm, LossFn, RewardFn, RolloutEngine
from miles_like.rewards.answered import answered_sample
from miles_like.types import (
    REFERENCE,
    VALUES,
    LossInputs,
    Prompt,
    Sample,
    SampleGroup,
    SamplingParams,
    Stat,
    Unscored,
)
from rollout.config import RolloutConfig
from rollout.episodes.runner import make_episode_runner
from rollout.prompts.source import Tokenizer

T = TypeVar("T")
_UNREACHED = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)
_NOT_THEIRS = (str(Path(__file__).resolve().parents[2]), sysconfig.get_paths()["stdlib"])


@dataclass(frozen=True, slots=True)
class Trial:
    """Calls plug-ins, for `limit_s` at most. online: whether they may use the network."""

    limit_s: float
    online: bool

    def call(self, what: str, function: Callable[[], T]) -> T:
        """Call `function()` in a thread, which is abandoned when it takes longer.

        Raises RuntimeError naming the line of the user's file that raised; NotCheckedError where the call did not end
        in time, or failed for lack of a network while not `online`.
        """
        result: list[T] = []
        raised: list[BaseException] = []

        def job() -> None:
            try:
                result.append(function())
            except BaseException as e:  # SystemExit too: it would end the thread and look like a timeout
                raised.append(e)

        thread = threading.Thread(target=job, name="trial call", daemon=True)
        thread.start()
        thread.join(self.limit_s)
        if raised:
            error = raised[0]
            if isinstance(error, NotCheckedError):
                raise error
            if not self.online and _is_of_network(error):
                raise NotCheckedError(f"its call on a row had no network access ({_words(error)})") from None
            kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
            raise RuntimeError(f"{what}, called on a row, failed: {kind}{_words(error)}{_place(error)}") from error
        if not result:
            raise NotCheckedError(f"its call on a row did not end within {self.limit_s:g} s")
        return result[0]

    def reward(self, what: str, reward: RewardFn, prompt: Prompt, samples: Sequence[Sample]) -> None:
        """Raises RuntimeError where the reward raises or returns an invalid score, NotCheckedError where it returns
        `Unscored`."""

        async def ask() -> Sequence[object]:
            try:
                return await reward([prompt] * len(samples), samples)
            finally:
                await reward.close()

        for outcome in self.call(what, lambda: asyncio.run(ask())):
            if isinstance(outcome, Unscored):
                raise NotCheckedError(f"it returned no score for the answer of a row ({outcome.reason})")

    def advantage(self, algorithm: Algorithm, groups: Sequence[SampleGroup]) -> None:
        what = "algorithm.advantage"
        self.call(what, lambda: _check_advantages(algorithm.advantages(groups), groups))

    def loss(self, algorithm: Algorithm) -> None:
        self.call("algorithm.loss", lambda: _check_loss(algorithm.loss))

    def group_filter(self, refuse: Callable[[SampleGroup], str | None], group: SampleGroup) -> None:
        self.call("algorithm.filter", lambda: refuse(group))

    def episode(self, config: RolloutConfig, tokenizer: Tokenizer, prompt: Prompt) -> None:
        """Run one episode of the environment, or call the generate function once, with an engine whose response to
        every prompt is its row's answer."""
        what = config.episode_key
        engine: RolloutEngine = make_episode_runner(config, tokenizer).wrap(_AnswerEngine(tokenizer))
        params = SamplingParams(max_new_tokens=config.max_new_tokens, sampling_seed=0)

        async def generate() -> None:
            await engine.generate([prompt], n=1, params=params)

        self.call(what, lambda: asyncio.run(generate()))


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _causes(error: BaseException) -> list[BaseException]:
    """The error, its causes and contexts, outermost first, and the members of exception groups."""
    out: list[BaseException] = []
    left: list[BaseException] = [error]
    while left:
        found = left.pop(0)
        if found in out:
            continue
        out.append(found)
        members = found.exceptions if isinstance(found, BaseExceptionGroup) else ()
        left += [e for e in (*members, found.__cause__ or found.__context__) if e is not None]
    return out


def _is_of_network(error: BaseException) -> bool:
    """Whether a connection failed: refused, timed out, unreachable, or a host name that does not resolve."""
    return any(
        isinstance(e, ConnectionError | TimeoutError | socket.gaierror)
        or (isinstance(e, OSError) and e.errno in _UNREACHED)
        for e in _causes(error)
    )


def _place(error: BaseException) -> str:
    """`, at file.py:2 in f: return 1/0` for the innermost line of the user's code; empty where there is none, or where
    the error's message names it."""
    for e in reversed(_causes(error)):
        for frame in reversed(traceback.extract_tb(e.__traceback__)):
            if not frame.filename.startswith((*_NOT_THEIRS, "<")):
                if f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" in str(error):
                    return ""
                return f", at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return ""


def samples_of(prompt: Prompt, tokenizer: Tokenizer, n: int, *, longest: int) -> tuple[Sample, ...]:
    """`n` samples of a prompt, with its answer, cut to `longest` tokens, as the response."""
    text = prompt.answer or "0"
    ids = tokenizer.encode(text, add_special_tokens=False)[:longest] or [0]
    return tuple(answered_sample(prompt, i, ids, text) for i in range(n))


def _check_advantages(found: Any, groups: Sequence[SampleGroup]) -> None:
    want = [len(g.samples) for g in groups]
    try:
        have = [len(of_group) for of_group in found]
    except TypeError:
        raise RuntimeError(f"it returned {found!r:.200}: expected a list of numbers for each group") from None
    if have != want:
        raise RuntimeError(f"it returned {have} advantages for groups of {want} samples: expected one per sample")
    for group, of_group in zip(groups, found, strict=True):
        for sample, one in zip(group.samples, of_group, strict=True):
            if isinstance(one, Tensor) and one.numel() > 1 and one.shape != sample.token_ids.shape:
                raise RuntimeError(
                    f"it returned shape {list(one.shape)} for a sample of {len(sample.token_ids)} tokens: "
                    "expected a number, or one number per token"
                )


def _check_loss(loss: LossFn) -> None:
    t = 4
    logprobs = torch.linspace(-2, -1, t, requires_grad=True)
    per_token, stats = loss(
        LossInputs(
            logprobs=logprobs,
            entropy=torch.ones(t, requires_grad=True),
            rollout_logprobs=logprobs.detach() + 0.01,
            advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
            loss_mask=torch.tensor([False, True, False, True]),
            cu_seqlens=torch.tensor([0, 2, 4], dtype=torch.int32),
            ref_logprobs=logprobs.detach(),
            old_logprobs=logprobs.detach(),
            streams={},
            candidate_logprobs=None,
        )
    )
    if not isinstance(per_token, Tensor) or per_token.shape != (t,):
        shape = list(per_token.shape) if isinstance(per_token, Tensor) else f"{per_token!r:.100}"
        raise RuntimeError(f"it returned shape {shape} for {t} packed tokens: expected a loss for each token, [{t}]")
    if wrong := [k for k, v in dict(stats).items() if not isinstance(v, Stat)]:
        raise RuntimeError(f"its statistic {wrong[0]!r} is not a Stat: see docs/extending.md")
    if not per_token.requires_grad:
        raise RuntimeError("its loss has no gradient: compute it from logprobs without detach()")


class _AnswerEngine:
    """A RolloutEngine whose response to a prompt is the answer of its row."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        longest = params.max_new_tokens
        return [SampleGroup(prompt=p, samples=samples_of(p, self._tokenizer, n, longest=longest)) for p in prompts]

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        response = sample.token_ids[sample.loss_mask][: params.max_new_tokens]
        ids = torch.cat([sample.token_ids, torch.tensor(list(environment), dtype=torch.int64), response])
        unmasked = torch.zeros(len(environment), dtype=torch.bool)
        mask = torch.cat([sample.loss_mask, unmasked, torch.ones(len(response), dtype=torch.bool)])
        return replace(sample, token_ids=ids, loss_mask=mask, logprobs=torch.where(mask, -1.0, 0.0))

    async def abort_all(self) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def weight_version(self) -> int:
        return 0

    async def close(self) -> None: ...


def scored(prompt: Prompt, samples: Sequence[Sample]) -> SampleGroup:
    """A group whose samples have the rewards 1, 0, 1, ... and every stream that an algorithm may need."""
    done = []
    for i, s in enumerate(samples):
        streams = {name: torch.zeros(len(s.token_ids)) for name in (REFERENCE, VALUES)}
        done.append(replace(s, reward=float(i % 2 == 0), streams=streams))
    return SampleGroup(prompt=prompt, samples=tuple(done))

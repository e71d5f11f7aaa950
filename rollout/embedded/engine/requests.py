"""The engine's requests, their state while they run, and their results.

Letters: P prompt tokens, R response tokens, V vocabulary.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from miles_like.types import Finish, SamplingParams
from rollout.embedded.engine.capture import RoutingRows
from rollout.wire.generate import GenerateReply, GenerateRequest, WireSpan
from rollout.wire.layer_states import MAX_TOKENS
from rollout.wire.scores import PromptTop


class SampledToken(NamedTuple):
    """A token that was just sampled. Log-probs are those of `rollout.embedded.engine.sampler.sample`."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens in its place and their log-probs, as many as requested
    finish: Finish | None  # why the sample ends with it, STOP: it is a stop token; None: it does not


class Watch(Protocol):
    """A callback for each token of a prompt's samples, as soon as it is sampled. Runs on the engine's thread, where
    it must not raise."""

    @property
    def top(self) -> int:
        """Number of most likely tokens that it is passed with each token."""

    def __call__(self, index: int, token: SampledToken) -> bool:
        """Whether sample `index` ends with this token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpec:
    """`n` samples of one prompt."""

    rid: str
    token_ids: tuple[int, ...]  # [P]
    sampling: SamplingParams
    n: int = 1
    first_index: int = 0  # sample i draws from random stream first_index + i
    ignore_eos: bool = False  # also ignores stop_token_ids: the samples end at max_new_tokens only
    logprob_start: int = -1  # first prompt token whose log-prob is requested; -1: none
    top: int = 0  # number of likeliest tokens whose log-probs are requested at each position after it
    routing_start: int | None = None  # first position whose experts are requested; None: none
    gates: bool = False  # gate weights are requested too
    states: bool = False  # the residual stream of every token at every layer is requested, and nothing is sampled
    watch: Watch | None = None

    @property
    def limit(self) -> int:
        """Maximum number of tokens of a sample."""
        return len(self.token_ids) + self.sampling.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The result of one sample."""

    reply: GenerateReply
    prompt_logprobs: tuple[float, ...]  # of prompt tokens logprob_start+1 .. P-1, from raw logits
    prompt_top: PromptTop | None = None  # at the same positions; None: not requested, or never fed
    states: NDArray[np.float32] | None = None  # [P, 2L+1, D], see rollout.wire.layer_states; None: likewise


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """The samples of one prompt; `deliver` is called once, with all of them."""

    spec: PromptSpec
    deliver: Callable[[list[Completed]], None]
    done: list[Completed | None]
    request: int = 0  # number of the request that the group belongs to
    request_samples: int = 1  # samples of that request, not counting those of no tokens
    prompt_logprobs: tuple[float, ...] | None = None  # None: not prefilled yet
    prompt_top: PromptTop | None = None  # None: not requested, or not prefilled yet

    def finish(self, index: int, result: Completed) -> None:
        assert self.done[index] is None, f"{self.spec.rid}/{index} finished twice"
        self.done[index] = result
        if all(d is not None for d in self.done):
            self.deliver([d for d in self.done if d is not None])


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One unfinished sample."""

    group: Group
    index: int
    key: int  # of its random stream
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # prompt tokens that came from the cache when it first started
    retractions: int = 0
    kept_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [R] while it is retracted
    kept_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))  # [R]
    kept_rows: RoutingRows | None = None  # of requested positions fed before the last retraction
    versions: list[tuple[str, int]] = field(default_factory=list)  # version, first response token under it

    @property
    def first_row(self) -> int:
        """First position whose routes are requested and not saved yet."""
        return (self.group.spec.routing_start or 0) + (len(self.kept_rows) if self.kept_rows else 0)

    def note_version(self, version: str, tokens: int) -> None:
        """Records that response tokens from `tokens` on are sampled under `version`."""
        if self.versions and self.versions[-1][1] == tokens:
            self.versions.pop()
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, tokens))

    def spans(self, tokens: int) -> tuple[WireSpan, ...]:
        ends = [start for _, start in self.versions[1:]] + [tokens]
        return tuple(WireSpan(v, s, e) for (v, s), e in zip(self.versions, ends, strict=True) if s < e)


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """Jobs that start from the same tokens: all samples of a prompt, or one retracted sample."""

    group: Group
    tokens: NDArray[np.int64]  # [P]
    jobs: deque[Job]
    hashes: list[bytes]  # of the pages that the tokens fill
    cached: int = 0  # tokens whose pages were found in the cache
    pages: list[int] = field(default_factory=list)  # of the tokens, held while jobs wait for them
    slots: Tensor | None = None  # [>= P] int64 slots of those pages; None: not admitted
    logits: Tensor | None = None  # [V] after the last token; None: not prefilled
    states: list[Tensor] = field(default_factory=list)  # [n, 2L+1, D] of each piece of the prefill, if requested

    @property
    def spec(self) -> PromptSpec:
        return self.group.spec


def specs_of(request: GenerateRequest) -> list[PromptSpec]:
    """The specs of a request's prompts. Raises ValueError for what is not supported: candidates of sampled tokens, and
    states of layers in a request that samples, begins to score later, or is long."""
    scored = request.logprob_start_len >= 0 and not any(s.max_new_tokens for s in request.sampling)
    if request.return_logprob and request.top_logprobs_num and not scored:
        raise ValueError(
            f"top_logprobs_num = {request.top_logprobs_num} is only supported for prompts that are scored: send "
            "max_new_tokens = 0 and a logprob_start_len of 0 or more, or remove it"
        )
    if request.return_layer_states and (why := _states_refusal(request)):
        raise ValueError(f"return_layer_states: {why}")
    rids = request.rid or tuple(uuid.uuid4().hex for _ in request.input_ids)
    return [
        PromptSpec(
            rid=rid,
            token_ids=ids,
            sampling=sampling,
            n=request.n,
            first_index=request.sample_index,
            ignore_eos=request.ignore_eos,
            logprob_start=request.logprob_start_len if request.return_logprob else -1,
            top=request.top_logprobs_num if request.return_logprob else 0,
            routing_start=request.routed_experts_start_len if request.return_routed_experts else None,
            gates=request.return_routed_experts and request.return_routed_weights,
            states=request.return_layer_states,
        )
        for rid, ids, sampling in zip(rids, request.input_ids, request.sampling, strict=True)
    ]


def _states_refusal(request: GenerateRequest) -> str:
    """Why a request for states of layers is refused; empty if it is not. Every token must be fed, none be cached."""
    if any(s.max_new_tokens for s in request.sampling) or request.logprob_start_len or not request.return_logprob:
        return (
            "only prompts that are scored from their first token have them: send max_new_tokens = 0, "
            "return_logprob = true and logprob_start_len = 0"
        )
    if (tokens := sum(map(len, request.input_ids))) > MAX_TOKENS:
        return f"{tokens:,} tokens in one request, but at most {MAX_TOKENS:,} are supported: send a shorter text"
    return ""

"""What the engine is asked for, what it keeps of it while it works, and what it gives back.

Letters: P prompt tokens, R response tokens, V vocabulary.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from miles_like.types import SamplingParams
from rollout.embedded.capture import RoutingRows
from rollout.wire import GenerateReply, GenerateRequest, WireSpan
from rollout.wire_scores import PromptTop


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpec:
    """`n` samples of one prompt."""

    rid: str
    token_ids: tuple[int, ...]  # [P]
    sampling: SamplingParams
    n: int = 1
    first_index: int = 0  # of the samples: sample i draws from stream first_index + i
    ignore_eos: bool = False  # stop_token_ids too: the samples end at max_new_tokens only
    logprob_start: int = -1  # first prompt token whose log-prob is wanted; -1: none
    top: int = 0  # likeliest tokens at each place after it whose log-probs are wanted too
    routing_start: int | None = None  # first position whose experts are wanted; None: none
    gates: bool = False  # with what the experts' outputs were weighted by

    @property
    def limit(self) -> int:
        """Most tokens a sample can have."""
        return len(self.token_ids) + self.sampling.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """One sample."""

    reply: GenerateReply
    prompt_logprobs: tuple[float, ...]  # of prompt tokens logprob_start+1 .. P-1, raw logits
    prompt_top: PromptTop | None = None  # at their places; None: not wanted, or never fed


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """The samples of one prompt; `deliver` is called once, with all of them."""

    spec: PromptSpec
    deliver: Callable[[list[Completed]], None]
    done: list[Completed | None]
    request: int = 0  # of the engine's requests, the one that the group belongs to
    asked: int = 1  # samples of that request in all; those of no tokens are not counted
    prompt_logprobs: tuple[float, ...] | None = None  # None: not prefilled yet
    prompt_top: PromptTop | None = None  # None: not wanted, or not prefilled yet

    def finish(self, index: int, result: Completed) -> None:
        assert self.done[index] is None, f"{self.spec.rid}/{index} finished twice"
        self.done[index] = result
        if all(d is not None for d in self.done):
            self.deliver([d for d in self.done if d is not None])


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One sample on its way."""

    group: Group
    index: int
    key: int  # of its random stream
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # prompt tokens that were not fed for it when it first started
    retractions: int = 0
    kept_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [R] while it is retracted
    kept_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))  # [R]
    kept_rows: RoutingRows | None = None  # of wanted positions fed before the last retraction
    versions: list[tuple[str, int]] = field(default_factory=list)  # version, first response token under it

    @property
    def first_row(self) -> int:
        """First position whose routes are wanted and not kept yet."""
        return (self.group.spec.routing_start or 0) + (len(self.kept_rows) if self.kept_rows else 0)

    def note_version(self, version: str, tokens: int) -> None:
        """From response token `tokens` on, `version` samples."""
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
    names: list[bytes]  # of the pages that the tokens fill
    cached: int = 0  # tokens whose pages were found: not to be fed
    pages: list[int] = field(default_factory=list)  # of the tokens, held while jobs still wait for them
    slots: Tensor | None = None  # [>= P] int64 of those pages; None: not admitted
    logits: Tensor | None = None  # [V] after the last token; None: not prefilled

    @property
    def spec(self) -> PromptSpec:
        return self.group.spec


def specs_of(asked: GenerateRequest) -> list[PromptSpec]:
    """What a request asks the engine for. Raises ValueError for candidates of sampled tokens, which are not served."""
    scored = asked.logprob_start_len >= 0 and not any(s.max_new_tokens for s in asked.sampling)
    if asked.return_logprob and asked.top_logprobs_num and not scored:
        raise ValueError(
            f"top_logprobs_num = {asked.top_logprobs_num} is served for prompts that are only scored: send "
            "max_new_tokens = 0 and a logprob_start_len of 0 or more, or leave it out"
        )
    rids = asked.rid or tuple(uuid.uuid4().hex for _ in asked.input_ids)
    return [
        PromptSpec(
            rid=rid,
            token_ids=ids,
            sampling=sampling,
            n=asked.n,
            first_index=asked.sample_index,
            ignore_eos=asked.ignore_eos,
            logprob_start=asked.logprob_start_len if asked.return_logprob else -1,
            top=asked.top_logprobs_num if asked.return_logprob else 0,
            routing_start=asked.routed_experts_start_len if asked.return_routed_experts else None,
            gates=asked.return_routed_experts and asked.return_routed_weights,
        )
        for rid, ids, sampling in zip(rids, asked.input_ids, asked.sampling, strict=True)
    ]

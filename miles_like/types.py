"""Values that cross a package boundary.

Letters: G samples a prompt, S tokens a sample, R response tokens, N samples a pack, T packed tokens, L MoE layers,
K experts a token, C candidates a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from torch import Tensor

from routing_replay.parts import RankRoutes
from routing_replay.tape import OwnRoutes
from routing_replay.trace import RoutingTrace
from routing_replay.versions import VersionSpan as VersionSpan

# what a column of a prompt file may hold
Json: TypeAlias = "str | int | float | bool | Sequence[Json] | Mapping[str, Json] | None"


class Finish(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Aggregation(StrEnum):
    """How the losses of a step's tokens become one number, whatever the layout and packing."""

    TOKEN_MEAN = "token_mean"  # over all tokens under loss (DAPO)
    SEQUENCE_MEAN = "sequence_mean"  # each sample's mean over its tokens, then over samples (GRPO's paper)
    SEQUENCE_SUM = "sequence_sum"  # each sample's sum over its tokens, then the mean over samples
    PROMPT_MEAN = "prompt_mean"  # the mean over all tokens of a prompt's samples, then over prompts
    CONSTANT = "constant"  # each sample's sum divided by one fixed length, then the mean over samples (Dr. GRPO)


class NamedTensor(NamedTuple):
    """A whole, unsharded tensor under its Hugging Face name."""

    name: str
    tensor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question, tokenized once; nothing downstream tokenizes it again."""

    id: str  # stable over runs
    token_ids: tuple[int, ...]
    answer: str  # "" where its row has none
    text: str = ""
    source: str = ""
    messages: tuple[Mapping[str, str], ...] = ()  # role and content of each, where a chat template made `text` of them
    meta: Mapping[str, Json] = field(default_factory=dict)  # the row's columns, without the prompt's own

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"prompt {self.id!r} has no tokens: give it a non-empty prompt text")


class Unit(StrEnum):
    """What a reward function must see at once."""

    SAMPLE = "sample"
    GROUP = "group"  # all samples of a prompt
    BATCH = "batch"  # all samples of several prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a sample is worth. Parts are for the log alone: `value` is what is trained on."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrong = {k: v for k, v in {"value": self.value, **self.parts}.items() if not math.isfinite(v)}
        if wrong:
            raise ValueError(f"a score has {wrong}: every number must be finite, and a sample without one is Unscored")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscored:
    """Nobody knows what a sample is worth; it is given up. No 0, which would say that it is bad."""

    reason: str  # a few words; samples are counted by it


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an environment answers to a turn of the policy."""

    text: str = ""  # put after the turn as it is, with whatever marks the model's chat template has for it
    token_ids: tuple[int, ...] = ()  # in place of text
    ends: bool = False  # the episode is over; there is nothing to add
    reward: float | None = None  # what the episode was worth; None: the run's reward says

    def __post_init__(self) -> None:
        if sum((bool(self.text), bool(self.token_ids), self.ends)) != 1:
            raise ValueError(f"{self}: give one of text, token_ids and ends = True")
        if self.reward is not None and not (self.ends and math.isfinite(self.reward)):
            raise ValueError(f"{self}: a reward is a finite number, given when the episode ends")


REFERENCE = "reference"  # stream: log-probs under the reference weights; also their name in the trainer
TEACHER = "teacher"  # stream: log-probs under a teacher's weights
TAUGHT = "taught"  # stream: 1 where a teacher spoke of the token, else 0
VALUES = "values"  # stream: the critic's estimate of what is still to come, before the token was chosen
RETURNS = "returns"  # stream: what a critic is to learn
TEACHER_CANDIDATES = "teacher_candidates"  # stream [S, C]: the teacher's log-probs of the sample's candidates


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One answer. Streams are over all S tokens, prompt first; what belongs to the prompt is masked."""

    prompt_id: str
    index: int  # 0..G-1 within its group
    token_ids: Tensor  # [S] int64
    loss_mask: Tensor  # [S] bool: True where the policy sampled the token
    logprobs: Tensor  # [S] fp32: rollout log p(token i | tokens < i), natural log; 0 where not loss_mask
    routing: RoutingTrace | None  # [S-1, L, K]
    versions: tuple[VersionSpan, ...]
    finish: Finish
    text: str
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)  # what the reward is made of, for the log
    streams: Mapping[str, Tensor] = field(default_factory=dict)  # [S] or [S, C] fp32: others on each token, by name
    candidates: Tensor | None = None  # [S, C] int64: further tokens at each place, which a loss asks log-probs of

    def __post_init__(self) -> None:
        s = self.token_ids.shape[0]  # len() of a tensor is slow, and a step makes hundreds of samples
        if not self.loss_mask.shape[0] == self.logprobs.shape[0] == s:
            raise ValueError(
                f"sample {self.name}: streams of unequal length: "
                f"{s} tokens, {len(self.loss_mask)} mask, {len(self.logprobs)} log-probs"
            )
        if s and bool(self.loss_mask[0]):
            raise ValueError(f"sample {self.name}: token 0 has no predecessor to be predicted from")
        if self.routing is not None and len(self.routing) != s - 1:
            raise ValueError(f"sample {self.name}: {len(self.routing)} routing rows for {s} tokens; want {s - 1}")
        more = dict(self.streams) if self.candidates is None else {**self.streams, "candidates": self.candidates}
        for name, stream in more.items():
            if stream.shape[0] != s:
                raise ValueError(f"sample {self.name}: stream {name!r} has {len(stream)} entries for {s} tokens")

    @property
    def name(self) -> str:
        """As messages and micro-batches call it."""
        return f"{self.prompt_id}/{self.index}"

    @property
    def response_len(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleGroup:
    """All samples of one prompt: the unit that advantages are computed over and the buffer hands out."""

    prompt: Prompt
    samples: tuple[Sample, ...]  # [G], fewer where some were given up
    discarded: Mapping[str, int] = field(default_factory=dict)  # reason -> samples of the prompt that were given up

    @property
    def oldest_version(self) -> int:
        """Oldest weight version any token of the group was sampled from."""
        return min((v.version for s in self.samples for v in s.versions), default=0)

    @property
    def rewards(self) -> list[float]:
        """[G]; raises ValueError when a sample was not scored."""
        out = []
        for s in self.samples:
            if s.reward is None:
                raise ValueError(f"sample {s.name} has no reward")
            out.append(s.reward)
        return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """N samples end to end, already shifted: position t holds an input token and everything about its label.

    Routes belong to samples by name: those of a whole micro-batch stand in the order of `samples`, those that were cut
    for a rank bring their own names along.
    """

    samples: tuple[str, ...]  # [N] names, each once: "prompt_id/index", "" for a token that fills an empty cell
    tokens: Tensor  # [T] int64, inputs
    labels: Tensor  # [T] int64, the token after each input
    positions: Tensor  # [T] int64, from 0 in each sample
    cu_seqlens: Tensor  # [N+1] int32
    loss_mask: Tensor  # [T] bool, of the label
    advantages: Tensor  # [T] fp32
    rollout_logprobs: Tensor  # [T] fp32, of the label
    routing: RoutingTrace | RankRoutes | None  # [T, L, K], or one rank's part of it
    # [T] fp32: what the label's loss is multiplied by before it is divided by TrainBatch.loss_tokens; None: 1 each
    weights: Tensor | None = None
    streams: Mapping[str, Tensor] = field(default_factory=dict)  # [T] or [T, C] fp32, of the label, by name
    candidates: Tensor | None = None  # [T, C] int64: tokens that the label might have been

    def __post_init__(self) -> None:
        t = len(self.tokens)
        if len(self.samples) != len(self.cu_seqlens) - 1 or len(set(self.samples)) != len(self.samples):
            raise ValueError(
                f"micro-batch of {len(self.cu_seqlens) - 1} samples has names {list(self.samples)}: give each its own"
            )
        lengths = {
            "labels": len(self.labels),
            "positions": len(self.positions),
            "loss_mask": len(self.loss_mask),
            "advantages": len(self.advantages),
            "rollout_logprobs": len(self.rollout_logprobs),
            "cu_seqlens[-1]": int(self.cu_seqlens[-1]),
            "routing": len(self.routing) if isinstance(self.routing, RoutingTrace) else t,
            "weights": t if self.weights is None else len(self.weights),
            "candidates": t if self.candidates is None else len(self.candidates),
            **{f"streams[{name!r}]": len(stream) for name, stream in self.streams.items()},
        }
        wrong = {k: n for k, n in lengths.items() if n != t}
        if wrong:
            raise ValueError(f"micro-batch of {t} tokens has streams of other lengths: {wrong}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """What one trainer rank says of its row, forward only."""

    logprobs: Sequence[Tensor]  # [T] fp32 of each micro-batch: of labels with loss, 0 elsewhere
    routes: Sequence[OwnRoutes]  # of each micro-batch: this rank's rows and layers; empty where it had no choice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """One optimizer step."""

    grid: tuple[tuple[MicroBatch, ...], ...]  # [dp][micro]: every row has the same number of micro-batches
    loss_tokens: int  # labels with loss over the whole grid: the one denominator
    versions: tuple[int, int]  # oldest and newest weight version in it

    def __post_init__(self) -> None:
        if len({len(row) for row in self.grid}) != 1:
            raise ValueError(
                f"rows of {[len(r) for r in self.grid]} micro-batches: each data-parallel rank needs as many"
            )


class Reduce(StrEnum):
    """How a statistic combines over micro-batches and ranks."""

    MEAN = "mean"  # sum of totals / sum of counts
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True, eq=False)
class Stat:
    """A statistic that can still be combined: `total` over `count` items (MEAN), of them (SUM), or the largest or
    smallest so far (MAX, MIN)."""

    total: Tensor  # [] fp32
    count: Tensor  # [] fp32
    reduce: Reduce = Reduce.MEAN


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What the optimizer steps of one rollout say of themselves, already reduced over all ranks."""

    version: int  # weight version after them
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw a response; names and meaning are SGLang's (docs/sampling.md)."""

    max_new_tokens: int
    temperature: float = 1.0  # below 1e-6: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary; 1: greedy
    min_p: float = 0.0  # of the largest probability
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None  # sample i of a prompt draws from a stream keyed by (sampling_seed, i)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """One weight publication."""

    version: int
    bytes: int  # of the tensors sent to each server; as base64, and for SGLang once a rank, it is more
    seconds: float  # whole publication
    pause_seconds: float  # of it, the servers generated nothing
    # of each rank of a server, tensor name -> hash of what it holds now, the same on all servers; (): not asked
    checksums: tuple[Mapping[str, str], ...] = ()

"""Values that cross a package boundary.

Letters: G samples a prompt, S tokens a sample, R response tokens, N samples a pack, T packed tokens, L MoE layers,
K experts a token, C candidates a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from routing_replay.rank_routes import RankRoutes
from routing_replay.replay import FedRows, RecordedRoutes
from routing_replay.trace import RoutingTrace
from routing_replay.versions import VersionSpan as VersionSpan

# a value of a prompt file's column
Json: TypeAlias = "str | int | float | bool | Sequence[Json] | Mapping[str, Json] | None"


class Finish(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Aggregation(StrEnum):
    """How the token losses of a step are reduced to one number, independent of layout and packing."""

    TOKEN_MEAN = "token_mean"  # over all loss tokens (DAPO)
    SEQUENCE_MEAN = "sequence_mean"  # each sample's mean over its tokens, then over samples (GRPO's paper)
    SEQUENCE_SUM = "sequence_sum"  # each sample's sum over its tokens, then the mean over samples
    PROMPT_MEAN = "prompt_mean"  # the mean over all tokens of a prompt's samples, then over prompts
    CONSTANT = "constant"  # each sample's sum divided by one fixed length, then the mean over samples (Dr. GRPO)


class NamedTensor(NamedTuple):
    """A whole, unsharded tensor under its Hugging Face name."""

    name: str
    tensor: Tensor


class WeightRegion(NamedTuple):
    """A rectangle of one Hugging Face tensor, which a trainer rank holds. A tensor of one dimension has one column."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor, of one or two dimensions
    dtype: str  # torch's name of that in which it is published
    rows: tuple[int, int]  # the first, and the one after the last
    columns: tuple[int, int]
    stage: int  # pipeline stage of the rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt. It is tokenized once; nothing downstream tokenizes it again."""

    id: str  # the same in every run
    token_ids: tuple[int, ...]
    answer: str  # "" if its row has none
    text: str = ""
    source: str = ""
    messages: tuple[Mapping[str, str], ...] = ()  # role and content of each, if `text` comes from a chat template
    meta: Mapping[str, Json] = field(default_factory=dict)  # the row's other columns

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"prompt {self.id!r} has no tokens: use a non-empty prompt text")


class Unit(StrEnum):
    """The samples that a reward function gets in one call."""

    SAMPLE = "sample"
    GROUP = "group"  # all samples of a prompt
    BATCH = "batch"  # all samples of several prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward of a sample. Training uses `value`; `parts` are only logged."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrong = {k: v for k, v in {"value": self.value, **self.parts}.items() if not math.isfinite(v)}
        if wrong:
            raise ValueError(f"a score has {wrong}: every number must be finite; return Unscored for an unknown reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscored:
    """The reward could not be computed: the sample is discarded rather than scored 0."""

    reason: str  # a few words; discarded samples are counted per reason
    # the server that computes it does not answer, or reports an internal error: it may come back
    away: bool = field(default=False, compare=False)


# a chat message: role and content, and what its role has besides
Message: TypeAlias = Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An environment's reply to a turn of the policy."""

    text: str = ""  # appended to the turn as it is, so it includes the chat template's markers
    token_ids: tuple[int, ...] = ()  # instead of text
    messages: tuple[Message, ...] = ()  # instead of text: the chat template's markers are added
    ends: bool = False  # the episode is over
    # of the turn that is answered. The reward of an episode is the sum of its turns'; None for all turns: the run's
    # reward scores it
    reward: float | None = None

    def __post_init__(self) -> None:
        if sum((bool(self.text), bool(self.token_ids), bool(self.messages), self.ends)) != 1:
            raise ValueError(f"{self}: set text, token_ids, messages or ends = True")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"{self}: a reward is a finite number")


class EnvironmentLost(Exception):
    """An environment, or what it needs, does not answer: its episode is discarded with this reason, a few words, and
    the run goes on. Any other exception of an environment ends the run."""


POLICY = "policy"  # `Span.who`: the policy sampled these tokens
ENVIRONMENT = "environment"  # `Span.who`: what answered a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of a sample's tokens: a turn, or what a parser found in one."""

    who: str  # POLICY or ENVIRONMENT
    start: int  # the index of its first token in the sample
    end: int  # one after the last
    what: str = "turn"  # "turn"; within one: "reasoning", "tool_call", "tool_result"
    name: str = ""  # of the tool
    status: str = ""  # of a tool call: "ok", or why it was not made; of a turn: why it ended, if not by the policy
    reward: float | None = None  # of a turn
    seconds: float = 0.0  # by the clock, to sample a turn or to answer it


REFERENCE = "reference"  # stream: log-probs under the reference weights; also the name of these weights in the trainer
TEACHER = "teacher"  # stream: log-probs under a teacher's weights
TAUGHT = "taught"  # stream: 1 where a teacher scored the token, else 0
VALUES = "values"  # stream: the critic's value estimate before the token was chosen
ADVANTAGES = "advantages"  # stream: of tokens, where they are not one number a sample
TRAINER_LOGPROBS = "trainer_logprobs"  # stream: of train.token_logprobs_every, only to be written
AGREEMENT = "routing_agreement"  # of a written sample: SharedExperts as a share
RETURNS = "returns"  # stream: the critic's training targets
GREEDY = "greedy"  # need of an algorithm: the first sample of each group is greedy, and is not trained on
ANSWER = "answer"  # stream: 1 at the tokens of the answer, 0 at those of the prompt
DESIRABLE = "desirable"  # stream: 1 at each token of a desirable sample, 0 at those of others
KL_BASELINE = "kl_baseline"  # stream: KTO's baseline of the step, nats, the same at each token
STEP_LABEL = "step_label"  # stream: at the token after each step, the share in [0, 1] to which it is right
TEACHER_CANDIDATES = "teacher_candidates"  # stream [S, C]: the teacher's log-probs of the sample's candidates


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One response to a prompt, or a row of several of one episode. All streams cover S tokens, prompt first; prompt
    tokens are masked."""

    prompt_id: str
    index: int  # 0..G-1 within its group; the rows of an episode have the same
    token_ids: Tensor  # [S] int64
    loss_mask: Tensor  # [S] bool: True where the policy sampled the token
    logprobs: Tensor  # [S] fp32: rollout log p(token i | tokens < i), natural log; 0 where not loss_mask
    routing: RoutingTrace | None  # [S-1, L, K]
    versions: tuple[VersionSpan, ...]
    finish: Finish
    text: str
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)  # components of the reward, only logged
    streams: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [S] or [S, C] fp32: other models' values
    candidates: Tensor | None = None  # [S, C] int64: further tokens at each position, whose log-probs a loss needs
    spans: tuple[Span, ...] = ()  # of an episode, by start; of equal starts the longer first
    row: int = 0  # within its episode, from 0

    def __post_init__(self) -> None:
        s = self.token_ids.shape[0]  # len() of a tensor is slow, and a step makes hundreds of samples
        if not self.loss_mask.shape[0] == self.logprobs.shape[0] == s:
            raise ValueError(
                f"sample {self.name}: streams of unequal length: "
                f"{s} tokens, {len(self.loss_mask)} mask, {len(self.logprobs)} log-probs"
            )
        if s and bool(self.loss_mask[0]):
            raise ValueError(f"sample {self.name}: token 0 cannot be a loss token, because no token precedes it")
        if self.routing is not None and len(self.routing) != s - 1:
            raise ValueError(f"sample {self.name}: {len(self.routing)} routing rows for {s} tokens, expected {s - 1}")
        more = dict(self.streams) if self.candidates is None else {**self.streams, "candidates": self.candidates}
        for name, stream in more.items():
            if stream.shape[0] != s:
                raise ValueError(f"sample {self.name}: stream {name!r} has {len(stream)} entries for {s} tokens")

    @property
    def name(self) -> str:
        """The sample's name in messages and micro-batches: "prompt_id/index", of further rows "prompt_id/index.row"."""
        return f"{self.prompt_id}/{self.index}.{self.row}" if self.row else f"{self.prompt_id}/{self.index}"

    @property
    def place(self) -> tuple[int, int]:
        """What it is known by in its group."""
        return self.index, self.row

    @property
    def length(self) -> int:
        """S"""
        return int(self.token_ids.shape[0])

    @property
    def response_len(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def turns(self) -> int:
        """The number of the policy's turns: stretches of loss tokens."""
        return int((self.loss_mask.int().diff() > 0).sum())

    def without_loss(self) -> Sample:
        """The sample without a loss token."""
        return replace(self, loss_mask=torch.zeros_like(self.loss_mask))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleGroup:
    """All samples of one prompt: the unit of advantages and of the buffer. Rows of an episode have one reward."""

    prompt: Prompt
    samples: tuple[Sample, ...]  # [G], fewer if some were discarded; rows of an episode are adjacent, in their order
    discarded: Mapping[str, int] = field(default_factory=dict)  # reason -> number of discarded episodes

    @property
    def episodes(self) -> tuple[Sample, ...]:
        """The first row of each episode."""
        return tuple(s for s in self.samples if not s.row)

    @property
    def rows(self) -> list[tuple[Sample, ...]]:
        """Of each of `episodes`."""
        of: dict[int, list[Sample]] = {}
        for s in self.samples:
            of.setdefault(s.index, []).append(s)
        return [tuple(rows) for rows in of.values()]

    @property
    def oldest_version(self) -> int:
        """Oldest weight version any token of the group was sampled from."""
        return min((v.version for s in self.samples for v in s.versions), default=0)

    @property
    def rewards(self) -> list[float]:
        """Of each of `episodes`; raises ValueError for a sample without a reward."""
        for s in self.samples:
            if s.reward is None:
                raise ValueError(f"sample {s.name} has no reward")
        return [s.reward for s in self.episodes if s.reward is not None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """N samples packed end to end, already shifted: position t holds an input token and all values of its label.

    Routes are matched to samples by their names: a whole micro-batch's are in the order of `samples`, a rank's part
    carries its own names.
    """

    samples: tuple[str, ...]  # [N] unique names, those of the samples; "" for the padding token of an empty cell
    tokens: Tensor  # [T] int64, inputs
    labels: Tensor  # [T] int64, the token after each input
    positions: Tensor  # [T] int64, from 0 in each sample
    cu_seqlens: Tensor  # [N+1] int32
    loss_mask: Tensor  # [T] bool, of the label
    advantages: Tensor  # [T] fp32
    rollout_logprobs: Tensor  # [T] fp32, of the label
    routing: RoutingTrace | RankRoutes | None  # [T, L, K], or one rank's part of it
    # [T] fp32: factor of the label's loss, applied before the division by TrainBatch.loss_tokens; None: 1 each
    weights: Tensor | None = None
    streams: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [T] or [T, C] fp32, of the label
    candidates: Tensor | None = None  # [T, C] int64: alternative tokens of the label

    def __post_init__(self) -> None:
        t = len(self.tokens)
        if len(self.samples) != len(self.cu_seqlens) - 1 or len(set(self.samples)) != len(self.samples):
            raise ValueError(
                f"micro-batch of {len(self.cu_seqlens) - 1} samples has names {list(self.samples)}: give unique names"
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
class LayerStates:
    """The residual stream of a micro-batch at this rank's layers (megatron_bridge/step/layer_states.py)."""

    fed: FedRows
    states: tuple[int, ...]  # [n] numbers
    values: Tensor  # [rows of `fed`, n, H], in the dtype of the activations


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """The forward pass of one trainer rank over its DP shard."""

    logprobs: Sequence[Tensor]  # of each micro-batch [T] fp32: of labels with loss, 0 elsewhere
    routes: Sequence[
        RecordedRoutes
    ]  # of each micro-batch, for this rank's tokens and layers; empty if routes were replayed
    states: Sequence[LayerStates] = ()  # of each micro-batch, if they were requested


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """One optimizer step."""

    grid: tuple[tuple[MicroBatch, ...], ...]  # [dp][micro]: every DP shard has the same number of micro-batches
    loss_tokens: int  # labels with loss over the whole grid: the denominator of the loss
    versions: tuple[int, int]  # oldest and newest weight version of its tokens

    def __post_init__(self) -> None:
        if len({len(row) for row in self.grid}) != 1:
            raise ValueError(
                f"rows of {[len(r) for r in self.grid]} micro-batches: each data-parallel rank needs the same number"
            )


class Reduce(StrEnum):
    """How a statistic is combined over micro-batches and ranks."""

    MEAN = "mean"  # sum of totals / sum of counts
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True, eq=False)
class Stat:
    """A partial statistic: `total` is the sum over `count` items (MEAN, SUM), or their largest or smallest value (MAX,
    MIN)."""

    total: Tensor  # [] fp32
    count: Tensor  # [] fp32
    reduce: Reduce = Reduce.MEAN


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The arguments of a loss function for one micro-batch of N samples and T packed tokens. Values are of the labels.

    Values outside `loss_mask` are arbitrary.
    """

    # [T] fp32, log-probabilities under the weights being trained; carries the gradient. With a scalar head: its output
    # for each input token that precedes a loss token; a critic's is the value before that token was chosen.
    logprobs: Tensor
    entropy: Tensor  # [T] fp32, of the distribution that the label is from; carries the gradient. Scalar head: 0
    rollout_logprobs: Tensor  # [T] fp32, as sampled
    advantages: Tensor  # [T] fp32
    loss_mask: Tensor  # [T] bool: True where the policy sampled the label
    cu_seqlens: Tensor  # [N+1] int32: bounds of the samples
    ref_logprobs: Tensor | None = None  # [T] fp32, under the reference weights; None: the trainer keeps none
    # [T] fp32, no gradient: by the trainer, under the weights with which this rollout's first optimizer step began.
    # None: the rollout gets one optimizer step, and they are `logprobs.detach()`.
    old_logprobs: Tensor | None = None
    streams: Mapping[str, Tensor] = field(default_factory=dict)  # [T] or [T, C] fp32, no gradient: MicroBatch.streams
    candidate_logprobs: Tensor | None = None  # [T, C] fp32, of MicroBatch.candidates; carries the gradient


# [T] fp32 loss of each token, and statistics by metric name
LossOutput: TypeAlias = tuple[Tensor, Mapping[str, Stat]]


class SharedExperts(NamedTuple):
    """Experts of a sample's recorded routes, over its tokens and MoE layers."""

    shared: int  # those that the trainer's routers choose too
    recorded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Metrics of the optimizer steps of one rollout, reduced over all ranks."""

    version: int  # weight version after these steps
    metrics: Mapping[str, float]
    # of each optimizer step: sample, by its name in the batch -> its routes, by the first forward of the rollout; of a
    # rank its own rows and layers. Samples without recorded routes or without a loss have none
    agreement: Sequence[Mapping[str, SharedExperts]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters; names and meaning are SGLang's (docs/sampling.md)."""

    max_new_tokens: int
    temperature: float = 1.0  # below 1e-6: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary; 1: greedy
    min_p: float = 0.0  # of the largest probability
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None  # sample i of a prompt draws from a random stream keyed by (sampling_seed, i)


class ServerLost(RuntimeError):
    """A server has died, hangs, cannot be reached, or answers that its engine has ended. What it was asked can be asked
    elsewhere."""


class NodeLostError(RuntimeError):
    """The node of a process is lost: none is started there again, also when the machine comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRank:
    """One rank whose process has ended, or does not answer."""

    role: str  # trainer, critic, reference
    index: int
    node: str  # address of its node
    why: str  # a clause


class RanksLostError(RuntimeError):
    """Ranks are lost, and with them the weights of their role."""

    def __init__(self, what: str, remedy: str, lost: Sequence[LostRank]) -> None:
        """what: names the ranks and the call that was under way, without the remedy."""
        super().__init__(f"{what}: {remedy}")
        self.what, self.lost = what, tuple(lost)


@dataclass(frozen=True, slots=True)
class ServerFault:
    """Why a server does not serve a version."""

    url: str
    why: str  # names the server
    answers: bool  # False: as ServerLost
    refused: bool = False  # it refused a request, which other servers may refuse too


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """One publication of weights to the servers."""

    version: int
    bytes: int  # sent to each server, of tensors; base64, and one copy per SGLang rank, make the transfer larger
    seconds: float  # of the whole publication
    pause_seconds: float  # of these, while the servers generated nothing
    checksums: tuple[Mapping[str, str], ...] = ()  # of a server's ranks: name -> hash of the loaded tensor; (): unasked
    whole_bytes: int | None = None  # of the tensors that a publication of all would send; None: this is one
    failed: tuple[ServerFault, ...] = ()  # servers that the publication has left out; the others serve the version
    directory: Path | None = None  # written, and not yet loaded by a server; None: the servers have the weights
    triton: float | None = (
        None  # share of rank 0's encoded weights that Triton kernels encoded; None: none were encoded
    )
    packed: float | None = (
        None  # share of the bytes of rank 0's buffers that a Triton kernel gathered; None: no buffers
    )
    decoding: float | None = None  # share of embedded servers in which Triton kernels decode; None: there are none

    def followed_by(self, later: PublishReport) -> PublishReport:
        """Both publications of one version as one: their bytes and seconds are added, the rest is the later one's."""
        return replace(
            later,
            bytes=self.bytes + later.bytes,
            seconds=self.seconds + later.seconds,
            pause_seconds=self.pause_seconds + later.pause_seconds,
        )

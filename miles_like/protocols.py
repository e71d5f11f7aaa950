"""The seams. Nothing here has a body; nothing here names a concrete class.

Letters: G samples a prompt, S tokens a sample, T packed tokens, N samples a pack, C candidates a token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from torch import Tensor

from miles_like.types import (
    Aggregation,
    MicroBatch,
    NamedTensor,
    Observation,
    Prompt,
    PublishReport,
    Sample,
    SampleGroup,
    SamplingParams,
    Score,
    Scored,
    Stat,
    StepReport,
    TrainBatch,
    Unit,
    Unscored,
)
from routing_replay.align import RankPart


class RolloutEngine(Protocol):
    """One server or many.

    An episode of several turns is `generate`, then for each sample, as long as it lasts, `continue_sample` with what
    the environment answered, and a reward at the end. A turn that comes back aborted goes on without an environment.
    """

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """`n` unscored samples of each prompt, in the order of `prompts`. They may have been aborted, some or all."""

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        """`sample`, the environment's tokens, which are not under loss, and at most `params.max_new_tokens` more.

        What it has stays as it is: log-probs, weight versions, routes. With the `sampling_seed` that `generate` had,
        its tokens are those of one go. Aborted before anything was sampled, it comes back as it was, without the
        environment's tokens.
        """

    async def abort_all(self) -> None:
        """All that is under way on the servers, whoever asked for it, comes back aborted with what it has."""

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def weight_version(self) -> int: ...
    async def close(self) -> None: ...


class WeightPublisher(Protocol):
    """Lives in every trainer rank: draining the stream is collective, one rank sends."""

    def publish(self, weights: Iterable[NamedTensor], *, version: int) -> PublishReport: ...


class Trainer(Protocol):
    """All ranks together, seen as one."""

    @property
    def dp_size(self) -> int: ...
    async def train(self, batches: Sequence[TrainBatch]) -> StepReport:
        """One rollout: an optimizer step for each batch, in order."""

    async def evaluate(self, batch: TrainBatch) -> Mapping[str, float]:
        """Forward only: the loss function's statistics, reduced over the batch."""

    async def logprobs(
        self, batch: TrainBatch, *, weights: str | None = None, candidates: bool = False
    ) -> Sequence[Sequence[Tensor]]:
        """[dp][micro] of [T] fp32: of labels under loss, 0 elsewhere (with a scalar head its values), under the weights
        now or under the copy of that name: REFERENCE, or one that `load_copy` made. With `candidates` [T, C]: of
        MicroBatch.candidates instead. Forward only; nothing changes. `unpacking` has the way back to samples."""

    async def load_copy(self, name: str, path: Path) -> None:
        """Keep the weights of a converted directory beside the trained ones, for `logprobs`."""

    async def publish(self, *, version: int) -> PublishReport: ...
    async def save(self, path: Path, *, asynchronous: bool = False) -> None:
        """With `asynchronous` the state is copied when this returns, and `path` is there when `finish_save` says so."""

    async def finish_save(self, *, wait: bool) -> bool:
        """Whether no save is under way any more; with `wait` always."""

    async def load(self, path: Path) -> None: ...
    async def close(self) -> None: ...


class LossFn(Protocol):
    """Per-token loss of one micro-batch. The trainer sums it over loss_mask and divides by TrainBatch.loss_tokens."""

    def __call__(
        self,
        *,
        # [T] fp32, of the labels under the weights being trained; carries the gradient. With a scalar head its number
        # for each input token that precedes a label under loss: a critic's value before that label was chosen.
        logprobs: Tensor,
        entropy: Tensor,  # [T] fp32, of the distribution that the label is from; carries the gradient. Scalar head: 0
        rollout_logprobs: Tensor,  # [T] fp32
        advantages: Tensor,  # [T] fp32
        loss_mask: Tensor,  # [T] bool
        cu_seqlens: Tensor,  # [N+1] int32
        ref_logprobs: Tensor | None,  # [T] fp32, under the reference weights; None where the trainer keeps none
        # [T] fp32, no gradient: by the trainer, under the weights with which this rollout's first optimizer step began.
        # None: it gets one optimizer step, and they are `logprobs.detach()`.
        old_logprobs: Tensor | None,
        streams: Mapping[str, Tensor],  # [T] or [T, C] fp32, no gradient: MicroBatch.streams
        candidate_logprobs: Tensor | None,  # [T, C] fp32, of MicroBatch.candidates; carries the gradient
    ) -> tuple[Tensor, Mapping[str, Stat]]: ...


class AdvantageFn(Protocol):
    """How much better each sample, or each of its tokens, was than expected."""

    def __call__(self, groups: Sequence[SampleGroup]) -> Sequence[Sequence[float | Tensor]]:
        """All scored groups of one rollout -> for each group [G]: a number for all tokens of the sample, or [S] fp32.

        A sample's `streams` hold what the configuration asks others about it. Raises ValueError for a reward that is
        missing or not finite.
        """


class Algorithm(Protocol):
    """Advantages, loss and how the losses of tokens become one number, bundled under a name."""

    @property
    def name(self) -> str: ...
    @property
    def loss(self) -> LossFn: ...
    @property
    def aggregation(self) -> Aggregation: ...
    @property
    def needs(self) -> frozenset[str]:
        """Streams that every sample must have before `advantages` is asked, of REFERENCE, TEACHER and VALUES."""

    def advantages(self, groups: Sequence[SampleGroup]) -> Sequence[Sequence[float | Tensor]]:
        """As `AdvantageFn`."""

    def returns(self, groups: Sequence[SampleGroup]) -> Sequence[Sequence[Tensor]] | None:
        """For each group [G] of [S] fp32: what a critic is to learn; None where there is none."""


class RewardFn(Protocol):
    """What samples are worth, as the loop asks it. miles_like/rewards makes one of any function that a user has: of a
    SampleReward, a GroupReward, a BatchReward, or one with another framework's signature (docs/rewards.md)."""

    @property
    def unit(self) -> Unit:
        """What it must see at once; it may be given more."""

    @property
    def slow(self) -> bool:
        """Whether it is worth asking while other prompts are still sampled, each in a request of its own."""

    @property
    def compares(self) -> str | None:
        """Which reward compares with the prompt's answer, so that every prompt must have one; None: none does."""

    async def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Sequence[Score | Unscored]:
        """Of each sample, in order; `prompts` has the prompt of each, and a prompt's samples stand together.

        Raises RuntimeError where the function itself is wrong: that ends the run. Cancelled, it leaves nothing behind.
        """

    async def close(self) -> None: ...


# What one sample is worth. A mapping: its "score", else its "reward", else the sum of its numbers; the other numbers
# are logged as parts, text is not. None: nobody can say, and the sample is asked about again, then given up.
RewardNumber: TypeAlias = float | Tensor | np.generic  # of one element, and finite
RewardResult: TypeAlias = RewardNumber | Mapping[str, RewardNumber | str | None] | Score | Unscored | None
RewardResults: TypeAlias = Sequence[RewardResult] | Tensor | np.ndarray  # one for each sample, in order


class SampleReward(Protocol):
    """A reward of one's own, of one sample. By the names of the parameters it is known how it is called."""

    def __call__(self, prompt: Prompt, sample: Sample) -> RewardResult | Awaitable[RewardResult]:
        """May be async, and must be where it waits for something. An exception ends the run."""


class GroupReward(Protocol):
    """A reward of one's own, of all samples of a prompt, which it may compare."""

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> RewardResults | Awaitable[RewardResults]:
        """As `SampleReward`."""


class BatchReward(Protocol):
    """A reward of one's own, of all samples of several prompts, for what is cheaper in one call."""

    def __call__(
        self, prompts: Sequence[Prompt], samples: Sequence[Sample]
    ) -> RewardResults | Awaitable[RewardResults]:
        """As `SampleReward`; `prompts` has the prompt of each sample."""


class Environment(Protocol):
    """What answers the policy in one episode; it may keep what it needs to between turns."""

    def __call__(self, sample: Sample, said: str) -> Observation | Awaitable[Observation]:
        """`said`: the text of the policy's last turn, which it ended itself; `sample`: the episode so far. May be
        async, and must be where it waits for something. An exception ends the run."""


class MakeEnvironment(Protocol):
    """An environment for each episode; a class with such a constructor is one."""

    def __call__(self, prompt: Prompt, *, seed: int) -> Environment:
        """`seed`: all randomness is to come from it; the same for the same step, prompt and index of the sample."""


class GenerateFn(Protocol):
    """A way of one's own from a prompt to samples."""

    async def __call__(
        self, engine: RolloutEngine, prompt: Prompt, *, n: int, params: SamplingParams
    ) -> Sequence[Sample]:
        """`n` samples of index 0 .. n-1, by calls of `engine`, whose samples have ended by themselves. One with a
        reward is not scored any more."""


class GroupFilter(Protocol):
    """Which scored groups are worth training on."""

    def __call__(self, group: SampleGroup) -> str | None:
        """None: keep it. Otherwise the reason why it is left out; another prompt is sampled in its place."""


class MetricSink(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class RankTrainer(Protocol):
    """One rank of the trainer; every call but `dp_rank` and `part` is collective.

    A row's routes are whole, or cut for the rank's part.
    """

    @property
    def dp_rank(self) -> int: ...
    @property
    def part(self) -> RankPart: ...
    @property
    def fingerprint(self) -> str | None:
        """Of the bits that all ranks compute; None unless the trainer is deterministic."""

    def train(self, rows: Sequence[Sequence[MicroBatch]], loss_tokens: Sequence[int], version: int) -> StepReport:
        """One rollout: an optimizer step for each row, in order; `version` is the weight version after all."""

    def evaluate(self, row: Sequence[MicroBatch], loss_tokens: int) -> Mapping[str, float]: ...
    def score(self, row: Sequence[MicroBatch], *, temperature: float | None = None, replay: bool = False) -> Scored:
        """Log-probabilities under the weights now, and the routers' choice; with `replay` the rollout's is taken."""

    def logprobs(
        self, row: Sequence[MicroBatch], weights: str | None = None, *, candidates: bool = False
    ) -> list[Tensor]:
        """Of each micro-batch, the same on every rank that has the row; as `Trainer.logprobs`."""

    def load_copy(self, name: str, path: Path) -> None: ...
    def export(self) -> Iterator[NamedTensor]: ...
    def save(self, path: Path, *, asynchronous: bool = False) -> None: ...
    def finish_save(self, *, wait: bool) -> bool: ...
    def load(self, path: Path) -> None: ...
    def close(self) -> None: ...

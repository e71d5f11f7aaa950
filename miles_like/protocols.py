"""Protocols between packages, and of user functions. No implementation and no concrete class is named here.

Letters: G samples a prompt, S tokens a sample, T packed tokens, N samples a pack, C candidates a token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from miles_like.records import AnyBatch, PlannedBatch
from miles_like.types import (
    Aggregation,
    LossInputs,
    LossOutput,
    NamedTensor,
    Observation,
    Prompt,
    PublishReport,
    Sample,
    SampleGroup,
    SamplingParams,
    Score,
    Scored,
    StepReport,
    TrainBatch,
    Unit,
    Unscored,
)


class Fencing(Protocol):
    """The epoch of a run directory that a process of the run holds (miles_like.storage.fencing)."""

    epoch: int

    def check(self) -> None:
        """Call before a write into the directory, and before a request that changes servers. Raises RuntimeError where
        a later start of the run has taken the place of this process."""


class RolloutEngine(Protocol):
    """One or several inference servers.

    An episode of several turns is one `generate`, then for each sample one `continue_sample` per turn with the
    environment's reply, and a reward at the end. An aborted turn is continued without an environment's reply.
    """

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """`n` unscored samples of each prompt, in the order of `prompts`. Any of them may have been aborted. Raises
        RuntimeError, naming the server, when a request fails."""

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        """`sample`, then the environment's tokens, without loss, then at most `params.max_new_tokens` new ones.

        Existing log-probs, weight versions and routes are unchanged. With the `sampling_seed` of `generate` the tokens
        are those of one uninterrupted generation. If it is aborted before a token was sampled, `sample` is returned
        unchanged, without the environment's tokens. Raises as `generate`.
        """

    async def abort_all(self) -> None:
        """Abort all requests on the servers, of every client; each returns the tokens it has. Raises as `generate`."""

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def weight_version(self) -> int: ...
    async def close(self) -> None: ...


class WeightPublisher(Protocol):
    """One in every trainer rank. Iterating over `weights` is collective; one rank sends. `publish` raises ValueError
    for weights that cannot be encoded, OSError when a disk is full, and RuntimeError when a server fails."""

    @property
    def every_rank(self) -> bool:
        """Whether each rank works on the weights, and not the sender alone."""

    def publish(self, weights: Iterable[NamedTensor], *, version: int) -> PublishReport: ...


class Trainer(Protocol):
    """All trainer ranks as one object."""

    @property
    def dp_size(self) -> int: ...
    async def train(self, batches: Sequence[AnyBatch]) -> StepReport:
        """Train on one rollout: one optimizer step per batch, in order. Raises ValueError for routes that do not fit a
        batch, and RuntimeError when a rank fails or exceeds its time limit."""

    async def evaluate(self, batch: TrainBatch) -> Mapping[str, float]:
        """The loss function's statistics, reduced over the batch. Forward only. Raises as `train`."""

    async def logprobs(
        self, batch: TrainBatch, *, weights: str | None = None, candidates: bool = False
    ) -> Sequence[Sequence[Tensor]]:
        """[dp][micro] of [T] fp32: log-probs of labels with loss (a scalar head's values), 0 elsewhere.

        `weights`: None for the current ones, REFERENCE, or the name of a copy that `load_copy` made. With `candidates`
        [T, C]: of MicroBatch.candidates instead. Forward only, no state changes. `unpacking` maps them to samples.
        Raises RuntimeError as `train`, also when there is no copy of that name.
        """

    async def held_logprobs(
        self, batch: PlannedBatch, *, weights: str | None = None, replay: bool = False
    ) -> Mapping[int, Sequence[Any]]:
        """As `logprobs`, of records, planned with `only`: holder -> references to parcels of sample name -> [S] fp32,
        for the holder alone; none of a sample without a loss token. With `replay`, of the current weights on the routes
        of the batch, which is planned without `only`. Raises also ColumnsLostError."""

    async def load_copy(self, name: str, path: Path) -> None:
        """Load the weights of a converted directory beside the trained ones, for `logprobs`. Raises RuntimeError when a
        rank cannot load them."""

    async def publish(self, *, version: int) -> PublishReport: ...
    async def save(self, path: Path, *, asynchronous: bool = False) -> None:
        """Save what `load` reads. With `asynchronous` this returns once the state is copied; `path` is complete when
        `finish_save` is true. Raises RuntimeError when a rank cannot write."""

    async def finish_save(self, *, wait: bool) -> bool:
        """Whether no save is in progress; with `wait` it waits, so that the result is True. Raises RuntimeError when a
        rank could not write."""

    async def load(self, path: Path) -> None: ...
    async def close(self) -> None: ...


class ServerChecks(Protocol):
    """Checks of the loop that servers and trainer agree. The methods raise RuntimeError, which ends the run."""

    async def before_training(self, step: int) -> None: ...
    async def before_publication(self) -> None: ...
    def hold_training(self, step: int) -> bool:
        """Whether the trainer must not go on before `published` has checked the publication of `step` steps."""

    async def published(
        self, step: int, report: PublishReport, *, beside_training: bool = False
    ) -> tuple[PublishReport, Mapping[str, float]]:
        """Returns the report with all that was sent of this version, and metrics. beside_training: the trainer trains
        the next step and is not asked."""


class TrainerRanks(Trainer, Protocol):
    """A Trainer of a run, whose ranks are processes."""

    def connect(self, factory: Callable[[int, int], WeightPublisher]) -> None:
        """Create every rank's publisher; the factory gets the rank and the number of ranks. Raises RuntimeError when a
        rank fails."""

    def fingerprint(self) -> str | None:
        """A hash of the results of the ranks' kernels; None unless the trainer is deterministic."""

    async def score(
        self, batch: TrainBatch, *, temperature: float, replay: bool, states: bool = False
    ) -> list[tuple[int, Scored]]:
        """For every rank (its DP shard, its result). states: with the residual stream at its layers. Forward only.
        Raises as `train`."""

    async def load(self, path: Path, *, version: int | None = None) -> None:
        """Load what `save` wrote. version: the version of the loaded weights, if no publication follows. Raises
        RuntimeError when a rank cannot load it."""


class LossFn(Protocol):
    """([T] loss of each token, statistics) of one micro-batch. The trainer sums the losses over `loss_mask` and divides
    by TrainBatch.loss_tokens."""

    def __call__(self, inputs: LossInputs) -> LossOutput: ...


Numbers: TypeAlias = tuple[float, ...]  # of a sample


class AdvantageParts(Protocol):
    """Advantages in parts, for groups in several processes (algorithms.advantages.parts)."""

    @property
    def measures(self) -> bool: ...
    @property
    def places(self) -> bool: ...
    def measure(self, groups: Sequence[SampleGroup]) -> tuple[Sequence[SampleGroup], Sequence[Sequence[Numbers]]]: ...
    def decide(
        self, groups: Sequence[SampleGroup], numbers: Sequence[Sequence[Numbers]]
    ) -> Sequence[Sequence[Numbers]]: ...
    def place(
        self, groups: Sequence[SampleGroup], decided: Sequence[Sequence[Numbers]]
    ) -> Sequence[Sequence[float | Tensor]]: ...


class AdvantageFn(Protocol):
    """Advantages of samples or of single tokens."""

    def __call__(self, groups: Sequence[SampleGroup]) -> Sequence[Sequence[float | Tensor]]:
        """All scored groups of one rollout -> for each group [G]: one number for all tokens of a sample, or [S] fp32.

        A sample's `streams` hold the values that the configured reference, critic and teachers gave it. Raises
        ValueError for a reward that is missing or not finite.
        """


class Algorithm(Protocol):
    """A named bundle of advantage, loss and aggregation."""

    @property
    def name(self) -> str: ...
    @property
    def loss(self) -> LossFn: ...
    @property
    def aggregation(self) -> Aggregation: ...
    @property
    def needs(self) -> frozenset[str]:
        """Streams that `advantages` reads, some of REFERENCE, TEACHER and VALUES; and GREEDY."""

    @property
    def parts(self) -> AdvantageParts | None:
        """Of `advantages`; None: it needs all samples with the values of their tokens at once."""

    def advantages(self, groups: Sequence[SampleGroup]) -> Sequence[Sequence[float | Tensor]]:
        """As `AdvantageFn`, with its errors."""

    def returns(self, groups: Sequence[SampleGroup]) -> Sequence[Sequence[Tensor]] | None:
        """For each group [G] of [S] fp32: the critic's training targets; None without a critic. Raises as
        `advantages`."""


class RewardFn(Protocol):
    """The reward as the loop calls it. miles_like/rewards wraps any user function: a SampleReward, a GroupReward, a
    BatchReward, or one with another framework's signature (docs/rewards.md)."""

    @property
    def unit(self) -> Unit:
        """The smallest set of samples that one call must contain; a call may contain several such sets."""

    @property
    def slow(self) -> bool:
        """Whether each prompt is scored as soon as it is sampled, instead of all prompts after sampling."""

    @property
    def compares(self) -> str | None:
        """Name of a reward that needs every prompt's reference answer; None: no reward needs it."""

    async def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Sequence[Score | Unscored]:
        """One score per sample, in order; `prompts` has the prompt of each, and samples of a prompt are adjacent.

        Raises RuntimeError for an error in the user's function, which ends the run. A cancelled call leaves no task or
        thread behind.
        """

    async def close(self) -> None: ...


# The reward of one sample. Of a mapping: its "score", else its "reward", else the sum of its numbers; other numbers
# are logged as parts, text is not. None: unknown; the call is retried, then the sample is discarded.
RewardNumber: TypeAlias = float | Tensor | np.generic  # of one element, and finite
RewardResult: TypeAlias = RewardNumber | Mapping[str, RewardNumber | str | None] | Score | Unscored | None
RewardResults: TypeAlias = Sequence[RewardResult] | Tensor | np.ndarray  # one for each sample, in order


class SampleReward(Protocol):
    """A user's reward of one sample. The parameter names decide which of the reward protocols a function has."""

    def __call__(self, prompt: Prompt, sample: Sample) -> RewardResult | Awaitable[RewardResult]:
        """May be async, and must be if it waits for I/O. An exception ends the run."""


class GroupReward(Protocol):
    """A user's reward of all samples of a prompt, which it may compare."""

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> RewardResults | Awaitable[RewardResults]:
        """As `SampleReward`."""


class BatchReward(Protocol):
    """A user's reward of all samples of several prompts in one call."""

    def __call__(
        self, prompts: Sequence[Prompt], samples: Sequence[Sample]
    ) -> RewardResults | Awaitable[RewardResults]:
        """As `SampleReward`; `prompts` has the prompt of each sample."""


class Environment(Protocol):
    """The environment of one episode; it may keep state between turns."""

    def __call__(self, sample: Sample, turn: str, /) -> Observation | Awaitable[Observation]:
        """`turn`: the text of the policy's last turn, which the policy ended; `sample`: the episode so far. May be
        async, and must be if it waits for I/O. An exception ends the run."""


class MakeEnvironment(Protocol):
    """Makes the environment of an episode; a class with this constructor fits."""

    def __call__(self, prompt: Prompt, *, seed: int) -> Environment:
        """`seed`: the source of all randomness; equal for equal step, prompt and index of the sample."""


class GenerateFn(Protocol):
    """A user's function from a prompt to samples."""

    async def __call__(
        self, engine: RolloutEngine, prompt: Prompt, *, n: int, params: SamplingParams
    ) -> Sequence[Sample | Sequence[Sample]]:
        """`n` samples of index 0 .. n-1, made by calls of `engine`, none of them aborted, or in place of a sample the
        rows of an episode, of one index and one reward: each sampled token is under loss in one row. A sample with a
        reward is not scored again; of rows the last one is scored. EnvironmentLost discards all `n`."""


class GroupFilter(Protocol):
    """Selects the scored groups that are trained on."""

    def __call__(self, group: SampleGroup) -> str | None:
        """None: keep it. Otherwise the reason why it is discarded; another prompt is sampled in its place."""


class RewardLog(Protocol):
    """Counts calls of rewards (miles_like.report.reward_calls). causes: "timeout", "away", "unscored"."""

    def begin(self, samples: int) -> None:
        """The scores of so many samples are asked for."""

    def end(self, samples: int, seconds: float) -> None:
        """They are there, or were not to be had, after `seconds`."""

    def retry(self, cause: str, samples: int) -> None: ...
    def fail(self, cause: str, samples: int) -> None: ...
    def spend(self, tokens: int) -> None:
        """A judge has read and written so many tokens."""

    def metrics(self) -> Mapping[str, float]:
        """Since the last call."""


class EpisodeLog(Protocol):
    """Counts requests of agents, and episodes that were in flight when the run was saved
    (miles_like.report.reward_calls)."""

    def replay(self, *, again: bool) -> None:
        """A new environment has got its turns. again: one answer was another, from which it is played again."""

    def record(self, counts: Mapping[str, int]) -> None:
        """Of an agent's episode: requests, rows, and why rows began (rollout.recorder.session)."""


class MetricSink(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...

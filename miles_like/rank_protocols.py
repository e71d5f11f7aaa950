"""Protocols of trainer ranks: what one rank does, how ranks signal each other, and how they divide the weights.

Letters: T packed tokens, C candidates a token.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from miles_like.types import MicroBatch, NamedTensor, Scored, StepReport, WeightRegion
from routing_replay.align import ShardSpec


class Signals(Protocol):
    """Named signals between trainer ranks. A rank that waits for one has no collective open."""

    def send(self, name: str) -> None: ...
    def wait_for(self, name: str) -> None:
        """Return once a rank has sent `name`; no time limit. Raises RuntimeError when rank 0 has ended."""

    def forget(self, name: str) -> None:
        """Remove a signal that every rank has seen."""

    def meet(self) -> None:
        """Return once every rank has called it as often; no time limit. Raises as `wait_for`."""

    def board(self, name: str) -> Board:
        """Another one at each call, with the texts of all of that name: one for each thread that reads."""


class Board(Protocol):
    """Texts under names, which trainer ranks leave for each other. Every method raises RuntimeError when rank 0 has
    ended."""

    def put(self, name: str, text: str) -> None: ...
    def number(self, name: str) -> int:
        """1, 2, ... for the calls of all ranks."""

    def read(self, name: str, seconds: float) -> str | None:
        """The text as soon as there is one; None after `seconds` without, at once if they are 0."""

    def remove(self, name: str) -> None:
        """A text or number that no rank reads any more."""


class WeightSources(Protocol):
    """The published weights divided among some ranks, the sources, which are numbered in the order of their turns. A
    source gathers its weights in chunks."""

    @property
    def ranks(self) -> Sequence[int]:
        """Of the sources."""

    @property
    def group(self) -> int:
        """Of this rank: ranks that help one source are of one group."""

    @property
    def helps(self) -> Collection[int]:
        """The sources whose chunks this rank helps to gather, itself included."""

    def chunks(self, source: int) -> int: ...
    def names(self, source: int) -> Iterator[str]:
        """Of the tensors that a source sends."""

    def gather(self, source: int, chunk: int) -> Sequence[NamedTensor]:
        """The tensors of a chunk, on its source; none on other ranks. Collective over those that help it."""


class WeightShards(Protocol):
    """What one trainer rank holds of the published weights, where it is."""

    @property
    def regions(self) -> Sequence[WeightRegion]:
        """Those of all ranks cover each tensor once, or hold equal copies of a region."""

    @property
    def names(self) -> Sequence[str]:
        """Of all tensors of the model, in the order of `RankTrainer.export`."""

    def values(self, numbers: Iterable[int]) -> Iterator[Tensor]:
        """The current values of these `regions`, [rows, columns]; they may share memory with the parameters. No
        communication."""

    def gathered(self, names: Container[str]) -> Iterator[NamedTensor]:
        """Whole tensors, as `RankTrainer.export` yields them: those in `names`, and those that are gathered with one.
        Draining it is collective."""


class ShardedWeights(Protocol):
    """The weights of one trainer rank for a publisher that sends shards. Iteration yields the whole stream."""

    def __iter__(self) -> Iterator[NamedTensor]: ...
    @property
    def number(self) -> int:
        """Of this publication, equal on all ranks: each has another one."""

    @property
    def signals(self) -> Signals: ...
    @property
    def shards(self) -> WeightShards: ...
    def gathered(self, names: Container[str]) -> Iterator[NamedTensor]:
        """As `WeightShards.gathered`, paced: no rank is in a collective while another waits for a server."""


class RankTrainer(Protocol):
    """One rank of the trainer; every method is collective.

    Routes of a DP shard (`shard`) are whole, or only this rank's part. Errors are raised on every rank: ValueError for
    arguments that do not fit the model, RuntimeError for a step that is not finite and for a rank that fails.
    """

    @property
    def dp_rank(self) -> int: ...
    @property
    def shard_spec(self) -> ShardSpec: ...
    @property
    def fingerprint(self) -> str | None:
        """Hash of a numerical self-test, equal on all ranks; None unless the trainer is deterministic."""

    @property
    def signals(self) -> Signals: ...
    def train(self, shards: Sequence[Sequence[MicroBatch]], loss_tokens: Sequence[int], version: int) -> StepReport:
        """One rollout: an optimizer step for each of `shards`, in order; loss_tokens: of each step, over all ranks;
        `version` is the weight version afterwards."""

    def evaluate(self, shard: Sequence[MicroBatch], loss_tokens: int) -> Mapping[str, float]: ...
    def score(
        self,
        shard: Sequence[MicroBatch],
        *,
        temperature: float | None = None,
        replay: bool = False,
        states: bool = False,
    ) -> Scored:
        """Log-probs under the current weights, and the routers' choice; with `replay` the rollout's routes are used.
        temperature: None: the run's. states: with the residual stream at this rank's layers."""

    def logprobs(
        self, shard: Sequence[MicroBatch], weights: str | None = None, *, candidates: bool = False
    ) -> list[Tensor]:
        """[T] fp32 of each micro-batch, or [T, C] with `candidates`; equal on every rank of the DP shard. Arguments as
        `Trainer.logprobs`."""

    def load_copy(self, name: str, path: Path) -> None: ...
    def export(self) -> Iterator[NamedTensor]: ...
    def shards(self) -> WeightShards:
        """The part of `export` that this rank holds. The object may be kept; its values are the current ones."""

    def sources(self, most: int) -> WeightSources:
        """The division of what `export` yields; most: sources where there are more of them than pipeline stages."""

    def save(self, path: Path, *, asynchronous: bool = False) -> None: ...
    def finish_save(self, *, wait: bool) -> bool: ...
    def load(self, path: Path) -> None: ...
    def sleep(self) -> Mapping[str, int]:
        """Free the device's memory of parameters, gradients and optimizer state until `wake`; returns the bytes freed
        by part. Meanwhile only `export` inside of `parameters`, `finish_save` and `close` may be called. Idempotent, as
        is `wake`."""

    def wake(self) -> None: ...
    def parameters(self) -> AbstractContextManager[None]:
        """A context in which the parameters are on the device for `export`, also of a trainer that sleeps."""

    def close(self) -> None: ...

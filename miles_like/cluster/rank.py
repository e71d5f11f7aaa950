"""One trainer rank: adds the routes to its micro-batches and calls its `RankTrainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from miles_like import spans
from miles_like.batch.parcel import Parcel
from miles_like.batch.portion import filled
from miles_like.batch.unpacking import unpack
from miles_like.cluster.gathering import Gathering
from miles_like.cluster.observed.memory import RankMemory
from miles_like.cluster.observed.profiling import contents, profiled
from miles_like.cluster.pacing import Pacer
from miles_like.cluster.rank_weights import RankWeights
from miles_like.protocols import WeightPublisher
from miles_like.rank_protocols import RankTrainer
from miles_like.records import PlannedMicroBatch
from miles_like.types import MicroBatch, PublishReport, Scored, StepReport
from quant.kernels.tally import ENCODED
from rollout.publish.buffers import PACKED
from rollout.publish.sources.publisher import SourcesPublisher
from routing_replay.align import ShardSpec
from routing_replay.rank_routes import RankRoutes

TrainerFactory = Callable[[int, int, str, int], RankTrainer]  # (rank, world, host, port)
PublisherFactory = Callable[[int, int], WeightPublisher]  # (rank, number of ranks)
Place = tuple[int, ShardSpec]  # (DP shard of a rank, the part of the shard's routes that it needs)
ShardRoutes = Sequence[RankRoutes | None]  # [micro]


def whole_shard(shard: Sequence[MicroBatch] | Sequence[PlannedMicroBatch], parts: Sequence[Any]) -> list[MicroBatch]:
    """A shard as it is computed. parts: the routes of the shard (ShardRoutes); of planned micro-batches, a parcel of
    each holder's portion. Raises ValueError as `portion.filled`."""
    planned = [m for m in shard if isinstance(m, PlannedMicroBatch)]
    if planned:
        return filled(planned, [parcel.value for parcel in parts])
    (routes,) = parts
    made = (m for m in shard if isinstance(m, MicroBatch))
    return [replace(m, routing=r) for m, r in zip(made, routes, strict=True)]


class Rank:
    """One trainer rank, independent of the transport of the calls.

    A batch reaches each rank at another time. A call with one begins when the last rank has it (`meet`), so that no
    rank waits in a collective for the transport of another.
    """

    publisher: WeightPublisher | None = None
    _publications = 0  # as many on every rank

    def start(self, factory: TrainerFactory, rank: int, world: int, host: str, port: int) -> Place:
        self.rank, self.world = rank, world
        self.trainer = factory(rank, world, host, port)
        return self.trainer.dp_rank, self.trainer.shard_spec

    def fingerprint(self) -> str | None:
        return self.trainer.fingerprint

    def connect(self, factory: PublisherFactory) -> None:
        self.publisher = factory(self.rank, self.world)

    def train(self, loss_tokens: Sequence[int], version: int, parts: Sequence[int], *shards: Any) -> StepReport:
        """`shards`: for each optimizer step the shard of its batch, then as many parts of it (`whole_shard`) as `parts`
        has for the step."""
        with profiled("train", version), spans.span("train", version=version) as span:
            with spans.span("fill"):
                whole, at = [], 0
                for n in parts:
                    whole.append(whole_shard(shards[at], shards[at + 1 : at + 1 + n]))
                    at += 1 + n
            if spans.on():
                span.add(**contents(whole))
            with spans.span("meet"):
                self.trainer.signals.meet()
            report = self.trainer.train(whole, loss_tokens, version)
        spans.flush()
        return replace(report, metrics={**report.metrics, **self.memory.metrics()})

    def evaluate(self, shard: Sequence[MicroBatch], routes: ShardRoutes, loss_tokens: int) -> Mapping[str, float]:
        with spans.span("evaluate"):
            self.trainer.signals.meet()
            return self.trainer.evaluate(whole_shard(shard, [routes]), loss_tokens)

    def score(
        self, shard: Sequence[MicroBatch], routes: ShardRoutes, temperature: float, replay: bool, states: bool
    ) -> Scored:
        with spans.span("score"):
            self.trainer.signals.meet()
            whole = whole_shard(shard, [routes])
            return self.trainer.score(whole, temperature=temperature, replay=replay, states=states)

    def logprobs(self, shard: Sequence[MicroBatch], weights: str | None, candidates: bool, reply: bool) -> list[Tensor]:
        """reply: return the result; False for the other ranks of a shard, whose results are equal."""
        with spans.span("logprobs", weights=weights):
            self.trainer.signals.meet()
            found = self.trainer.logprobs(shard, weights, candidates=candidates)
        return [x.cpu() for x in found] if reply else []

    def held_logprobs(
        self,
        cells: Sequence[PlannedMicroBatch],
        weights: str | None,
        replay: bool,
        names: Sequence[Sequence[str]],
        *portions: Any,
    ) -> Any:
        """As `logprobs`, of planned micro-batches; with `replay` on their routes. names: of the samples of each holder,
        to which the values go; of none on the other ranks of a shard. Returns None, then a parcel for each holder:
        name -> [S] fp32."""
        with spans.span("logprobs", weights=weights):
            whole = whole_shard(cells, portions)
            self.trainer.signals.meet()
            found = self.trainer.score(whole, replay=True).logprobs if replay else self.trainer.logprobs(whole, weights)
        if not names:
            return None
        streams = unpack([whole], [[x.cpu() for x in found]])
        return (None, *(Parcel({name: streams[name] for name in own}) for own in names))

    def load_copy(self, name: str, path: Path) -> None:
        self.trainer.load_copy(name, path)

    def publish(self, version: int) -> PublishReport:
        before, packed = ENCODED.now(), PACKED.now()
        with profiled("publish", version), spans.span("publish", version=version):
            report = self._publish(version)
        spans.flush()
        return replace(report, triton=ENCODED.share_since(before), packed=PACKED.share_since(packed))

    def _publish(self, version: int) -> PublishReport:
        assert self.publisher is not None, "publish before connect"
        self._publications += 1
        with self.trainer.parameters():
            if isinstance(self.publisher, SourcesPublisher):
                sources = self.trainer.sources(self.publisher.most_sources)
                work = partial(self.publisher.publish_part, version=version)
                return self.gathering.publish(sources, work, version=version)
            weights = RankWeights(
                self.trainer, self.pacer, number=self._publications, together=self.publisher.every_rank
            )
            return self.publisher.publish(weights, version=version)

    @cached_property
    def memory(self) -> RankMemory:
        return RankMemory()

    @cached_property
    def pacer(self) -> Pacer:
        """One for all publishers of this rank, because the ranks count the streams."""
        return Pacer(self.trainer.signals, sends=self.rank == 0)

    @cached_property
    def gathering(self) -> Gathering:
        """One for all publishers from several sources."""
        return Gathering(self.trainer.signals, self.rank)

    def save(self, path: Path, asynchronous: bool) -> None:
        with spans.span("save"):
            self.trainer.save(path, asynchronous=asynchronous)
        spans.flush()  # it may be the last call

    def finish_save(self, wait: bool) -> bool:
        return self.trainer.finish_save(wait=wait)

    def load(self, path: Path) -> None:
        with spans.span("load"):
            self.trainer.load(path)

    def sleep(self) -> Mapping[str, int]:
        with spans.span("sleep"):
            return self.trainer.sleep()

    def wake(self) -> None:
        with spans.span("wake"):
            self.trainer.wake()

    def close(self) -> None:
        spans.flush()
        self.trainer.close()

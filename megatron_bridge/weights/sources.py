"""Division of the published weights among the ranks that send them, the sources.

Each pipeline stage has a source, its first rank, which sends the stage's tensors: none is broadcast to other stages.
With expert parallelism each expert-parallel rank of a stage has one, if these are at most as many as asked for: it
sends the experts of its rank, which are not gathered over expert parallelism, and the first one of a stage the other
tensors too. All of them are in one replica of the model. A chunk is a bucket of the export that one source gathers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron_bridge.config import ParallelConfig
from megatron_bridge.weights.export import ExportPlan, _Exporter, _Key, _Slot
from miles_like.types import NamedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A rank that sends the tensors of its stage, with `experts` the experts of one expert-parallel rank alone."""

    rank: int
    stage: int
    experts: int | None  # expert-parallel rank; None: the experts of all of them
    others: bool  # it sends the stage's other tensors

    def sends(self, key: _Key) -> bool:
        return key.stage == self.stage and (key.per_expert or self.others)


def sources_of(layout: ParallelConfig, *, most: int, experts: bool) -> tuple[Source, ...]:
    """The sources in the order of their turns: stage by stage, and within a stage by expert-parallel rank.

    most: sources where these are more than the stages; a stage has one otherwise. experts: whether the model has some.
    Ranks are numbered as megatron numbers them: tensor, context and expert parallelism inside of data parallelism,
    stages outermost; experts are divided over consecutive ranks of a stage.
    """
    size = layout.world_size // layout.pp
    ranks = range(layout.ep) if experts and layout.ep > 1 and layout.pp * layout.ep <= most else None
    if ranks is None:
        return tuple(Source(rank=s * size, stage=s, experts=None, others=True) for s in range(layout.pp))
    return tuple(
        Source(rank=s * size + e * layout.etp, stage=s, experts=e, others=e == 0)
        for s in range(layout.pp)
        for e in ranks
    )


class SourcePlan:
    """Which source sends which tensors in which chunks: a function of the layout and the slots of all stages, and so
    the same on every rank."""

    def __init__(
        self, slots: Sequence[_Slot], exporter: _Exporter, layout: ParallelConfig, *, most: int, bucket_bytes: int
    ) -> None:
        """slots: of the whole model, in the order of the export."""
        experts = any(exporter.entry(slot).per_expert for slot in slots)
        self._exporter, self._layout = exporter, layout
        chunks = {
            source: [
                bucket
                for key, group in groupby(slots, key=exporter.key)
                if source.sends(key)
                for bucket in exporter.buckets(group, bucket_bytes, source.experts)
            ]
            for source in sources_of(layout, most=most, experts=experts)
        }
        self.sources = tuple(source for source, own in chunks.items() if own)  # a stage may have no expert
        self._chunks = [own for own in chunks.values() if own]

    def chunks(self, source: int) -> list[list[_Slot]]:
        return self._chunks[source]

    def names(self, source: int) -> Iterator[str]:
        """Names of the tensors that a source sends, in their order."""
        for bucket in self._chunks[source]:
            yield from self._exporter.names(bucket, self.sources[source].experts)

    def holds_shards(self, rank: int, source: int, bucket: Sequence[_Slot]) -> bool:
        """Whether `rank` takes part when `source` gathers the bucket."""
        p, which = self._layout, self.sources[source]
        size = p.world_size // p.pp
        stage, place = divmod(rank, size)
        key = self._exporter.key(bucket[0])
        if stage != which.stage:
            return False
        if not key.per_expert:
            return place < (1 if key.replicated else p.tp)
        return place < p.ep * p.etp if which.experts is None else place // p.etp == which.experts


class WeightSources:
    """The plan on one rank. Construct it on every rank; it involves no communication."""

    def __init__(self, export: ExportPlan, layout: ParallelConfig, *, rank: int, most: int) -> None:
        exporter = self._exporter = export.exporter
        size = layout.world_size // layout.pp
        stage, place = divmod(rank, size)
        groups = exporter.parallel
        found = tuple(g.rank() for g in (groups.pp_group, groups.tp_group, groups.etp_group, groups.ep_group))
        wanted = (stage, place % layout.tp, place % layout.etp, place // layout.etp % layout.ep)
        assert found == wanted, f"rank {rank} is at (stage, tp, etp, ep) {found}, by the order of ranks at {wanted}"
        self.plan = SourcePlan(export.slots, exporter, layout, most=most, bucket_bytes=export.bucket_bytes)
        self._rank, self.most = rank, most
        self.group = stage
        self.ranks = tuple(source.rank for source in self.plan.sources)
        self.helps = frozenset(
            number
            for number in range(len(self.ranks))
            if any(self.plan.holds_shards(rank, number, bucket) for bucket in self.plan.chunks(number))
        )

    def chunks(self, source: int) -> int:
        """Number of a source's chunks."""
        return len(self.plan.chunks(source))

    def names(self, source: int) -> Iterator[str]:
        return self.plan.names(source)

    def gather(self, source: int, chunk: int) -> list[NamedTensor]:
        """The tensors of a chunk on its source, none on the other ranks. Collective over the ranks that hold shards of
        them; the others return at once. A tensor may share memory with the model."""
        bucket = self.plan.chunks(source)[chunk]
        if not self.plan.holds_shards(self._rank, source, bucket):
            return []
        keep = self.ranks[source] == self._rank
        return self._exporter.gathered(bucket, only=self.plan.sources[source].experts, keep=keep)

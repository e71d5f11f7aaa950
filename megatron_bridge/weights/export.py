"""This rank's shards -> a stream of complete Hugging Face tensors, as published to the rollout.

Every rank yields every tensor; draining the stream is collective. Shards are sent in buckets of one kind: one
all-gather per bucket (over tensor-parallel ranks; for experts also over expert-parallel ranks, where a local expert
number stands for one expert on each rank), then one broadcast from the pipeline stage that owns the bucket. Values are
the parameters cast to the checkpoint's dtype, otherwise unchanged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_bridge.device.collective_errors import gather_objects
from megatron_bridge.families.base import Entry, Family, HFConfig, Split, TensorMap
from megatron_bridge.optim.param_names import layer_renamer
from megatron_bridge.optim.te_names import is_extra
from miles_like.types import NamedTensor

BUCKET_BYTES = 256 << 20
_Value = Callable[[Any], Tensor]  # parameter -> the weight to export
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


class ExportGroups(Protocol):
    """The process groups that hold the shards of one model replica."""

    @property
    def tp_group(self) -> ProcessGroup: ...
    @property
    def etp_group(self) -> ProcessGroup: ...
    @property
    def ep_group(self) -> ProcessGroup: ...
    @property
    def pp_group(self) -> ProcessGroup: ...


class _Key(NamedTuple):
    """Slots with equal keys may share a bucket; keys also give the order of the stream."""

    stage: int
    per_expert: bool
    replicated: bool
    fp32: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """A parameter on each rank of one stage: the same parameter, or for experts one local expert on each EP rank."""

    stage: int
    entry_index: int
    layer: int | None
    local_expert: int | None
    tensor: Tensor | None  # the parameter that holds this rank's shard; None if another stage owns it


class ExportPlan:
    """The buckets of a model, computed once and used for every export. Construction is collective with pipeline stages.

    `model_chunks` are this rank's GPTModels of either spec (one per virtual stage), wrapped or not. `mtp`: they include
    the draft layers; tensors that a draft layer's checkpoint repeats (embedding, head) are repeated here.
    `bucket_bytes` limits the size of a gathered bucket, in bytes of complete tensors.

    Raises ValueError for a parameter that is not in the family's table, and AssertionError when the stages together do
    not hold every tensor of the model.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        family: Family,
        hf_config: HFConfig,
        parallel: ExportGroups,
        *,
        mtp: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        tensors = family.bind(hf_config, mtp=mtp)
        self.exporter = exporter = _Exporter(tensors, parallel)
        slots = sorted(_unique(_all_slots(model_chunks, tensors, parallel)), key=exporter.key)
        covered = sum(exporter.copies(slot) * len(exporter.entry(slot).hf) for slot in slots)
        expected = sum(1 for _ in tensors.places())
        assert covered == expected, f"the model's stages hold {covered} tensors, the config has {expected}"
        self.slots, self.bucket_bytes = slots, bucket_bytes
        self._buckets = [
            bucket for _, group in groupby(slots, key=exporter.key) for bucket in exporter.buckets(group, bucket_bytes)
        ]

    def names(self) -> Iterator[str]:
        """Names of the stream's tensors, in its order; involves no communication."""
        for bucket in self._buckets:
            yield from self.exporter.names(bucket)

    def export(self, *, computed: bool = False, only: Container[str] | None = None) -> Iterator[NamedTensor]:
        """Yield every Hugging Face tensor of the model once, in the same order on all ranks, with the parameters'
        current values; `computed`: of the weights that the model computes with, which are rounded in quantization-aware
        training. gate_proj is followed by its up_proj. A tensor may share memory with its bucket or with the model: use
        or copy it before the next optimizer step. Draining the iterator is collective.

        only: the same on all ranks; other slots than those with a tensor of such a name are left out."""
        for bucket in self._buckets:
            chosen = bucket if only is None else [slot for slot in bucket if self.exporter.has(slot, only)]
            if chosen:
                yield from self.exporter.export(chosen, _computed if computed else _served)


def _all_slots(chunks: Sequence[torch.nn.Module], tensors: TensorMap, parallel: ExportGroups) -> list[_Slot]:
    """The slots of every stage, in the same order on all ranks."""
    stages, stage = parallel.pp_group.size(), parallel.pp_group.rank()
    own = [slot for chunk in chunks for slot in _local_slots(chunk, tensors, stage)]
    if stages == 1:
        return own
    described = gather_objects([(slot.entry_index, slot.layer, slot.local_expert) for slot in own], parallel.pp_group)
    slots = []
    for s, listed in enumerate(described):
        remote = [
            _Slot(stage=s, entry_index=index, layer=layer, local_expert=expert, tensor=None)
            for index, layer, expert in listed
        ]
        slots.extend(own if s == stage else remote)
    return slots


def _unique(slots: Iterable[_Slot]) -> list[_Slot]:
    """The first slot of each parameter: a last stage with draft layers holds a second copy of the embedding."""
    first: dict[tuple[int, int | None, int | None], _Slot] = {}
    for slot in slots:
        first.setdefault((slot.entry_index, slot.layer, slot.local_expert), slot)
    return list(first.values())


def _local_slots(chunk: torch.nn.Module, tensors: TensorMap, stage: int) -> Iterator[_Slot]:
    model: Any = chunk
    while hasattr(model, "module"):  # DistributedDataParallel, Float16Module
        model = model.module
    rename = layer_renamer(model)
    indexes = {id(entry): index for index, entry in enumerate(tensors.entries)}
    for name, value in model.state_dict(keep_vars=True).items():
        if is_extra(name) or getattr(value, "merged", False):
            continue
        name = rename(name)
        if tensors.is_copy(name):
            continue
        expert = _LOCAL_EXPERT.search(name)
        place = tensors.places_in(name)[0]
        yield _Slot(
            stage=stage,
            entry_index=indexes[id(place.entry)],
            layer=place.layer,
            local_expert=int(expert[1]) if expert else None,
            tensor=value,
        )


class _Exporter:
    """Gathers and broadcasts buckets; has no state between them."""

    def __init__(self, tensors: TensorMap, parallel: ExportGroups) -> None:
        self.tensors = tensors
        self.parallel = parallel
        self.stage = parallel.pp_group.rank()

    def entry(self, slot: _Slot) -> Entry:
        return self.tensors.entries[slot.entry_index]

    def key(self, slot: _Slot) -> _Key:
        entry = self.entry(slot)
        fp32 = self.tensors.dtype(entry) is torch.float32
        return _Key(slot.stage, entry.per_expert, entry.split is Split.REPLICATED, fp32)

    def copies(self, slot: _Slot, only: int | None = None) -> int:
        """Number of Megatron parameters of a slot, those of expert-parallel rank `only` where it is given."""
        return self.parallel.ep_group.size() if self.entry(slot).per_expert and only is None else 1

    def buckets(self, slots: Iterable[_Slot], limit: int, only: int | None = None) -> Iterator[list[_Slot]]:
        bucket: list[_Slot] = []
        size = 0
        for slot in slots:
            entry = self.entry(slot)
            elements = self.copies(slot, only) * math.prod(self.tensors.megatron_shape(entry))
            nbytes = elements * self.tensors.dtype(entry).itemsize
            if bucket and size + nbytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(slot)
            size += nbytes
        if bucket:
            yield bucket

    def export(self, bucket: Sequence[_Slot], value: _Value) -> Iterator[NamedTensor]:
        owner = bucket[0].stage
        whole = self._gather(bucket, value) if owner == self.stage else None
        yield from self._named(bucket, self._broadcast(bucket, whole, owner))

    def gathered(self, bucket: Sequence[_Slot], *, only: int | None, keep: bool) -> list[NamedTensor]:
        """As `export` of the published weights, on the ranks that hold shards of the bucket alone. only: of experts,
        those of this expert-parallel rank, its own; None: of all. keep: False for ranks that help others, which get
        none."""
        whole = self._gather(bucket, _served, only, keep=keep)
        return list(self._named(bucket, iter(whole), only)) if keep else []

    def names(self, bucket: Sequence[_Slot], only: int | None = None) -> Iterator[str]:
        """The names that `export` yields, with `only` those of `gathered`."""
        yield from (name for slot in bucket for names in self._names(slot, only) for name in names)

    def _named(
        self, bucket: Sequence[_Slot], tensors: Iterator[Tensor], only: int | None = None
    ) -> Iterator[NamedTensor]:
        for slot in bucket:
            for name, *copies in self._names(slot, only):
                tensor = next(tensors)
                yield NamedTensor(name, tensor)
                yield from (NamedTensor(copy, tensor) for copy in copies)

    def has(self, slot: _Slot, names: Container[str]) -> bool:
        """Whether one of `names` is a tensor of the slot."""
        return any(name in names for name in self.names([slot]))

    def _names(self, slot: _Slot, only: int | None) -> Iterator[tuple[str, ...]]:
        """For each tensor of a slot, its name and the names of its copies."""
        entry = self.entry(slot)
        copies = self.copies(slot)
        local = self.tensors.experts_of(entry) // copies
        for rank in range(copies) if only is None or not entry.per_expert else (only,):
            expert = None if slot.local_expert is None else rank * local + slot.local_expert
            for pattern in entry.hf:
                yield pattern.format(i=slot.layer, e=expert), *self.tensors.copies_of(entry)

    def _gather(
        self, bucket: Sequence[_Slot], value: _Value, only: int | None = None, *, keep: bool = True
    ) -> list[Tensor]:
        """Complete tensors of a bucket of this rank's stage, in the order of the names; none unless `keep`."""
        first = self.entry(bucket[0])
        dtype = self.tensors.dtype(first)
        shards = [value(slot.tensor).to(dtype) for slot in bucket if slot.tensor is not None]
        ranks = [shards]
        if first.per_expert:
            ranks = self._all_gather(ranks, self.parallel.etp_group)
            tensor_ranks = len(ranks)
            ranks = self._all_gather(ranks, self.parallel.ep_group) if only is None else ranks
        else:
            if first.split is not Split.REPLICATED:
                ranks = self._all_gather(ranks, self.parallel.tp_group)
            tensor_ranks = len(ranks)
        whole: list[Tensor] = []
        if not keep:
            return whole
        for number, slot in enumerate(bucket):
            for copy in range(0, len(ranks), tensor_ranks):
                pieces = [held[number] for held in ranks[copy : copy + tensor_ranks]]
                whole.extend(self._merge(self.entry(slot), pieces))
        return whole

    @staticmethod
    def _all_gather(ranks: list[list[Tensor]], group: ProcessGroup) -> list[list[Tensor]]:
        """[ranks gathered so far][slot] -> [group rank x ranks gathered so far][slot], in one collective."""
        if group.size() == 1:
            return ranks
        mine = torch.cat([shard.reshape(-1) for held in ranks for shard in held])
        gathered = mine.new_empty(group.size() * mine.numel())
        dist.all_gather_into_tensor(gathered, mine, group=group)
        sizes = [shard.numel() for shard in ranks[0]]
        rows = gathered.view(group.size() * len(ranks), -1)
        return [
            [flat.view(shard.shape) for flat, shard in zip(torch.split(row, sizes), ranks[0], strict=True)]
            for row in rows
        ]

    def _merge(self, entry: Entry, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Shards in rank order -> the complete Hugging Face tensors of one Megatron parameter."""
        shapes = self.tensors.shapes(entry)
        if entry.split is Split.REPLICATED:
            tensors = [pieces[0]]
        elif entry.split is Split.GATE_UP:
            halves = [piece.chunk(2) for piece in pieces]
            tensors = [_concat([half[k] for half in halves], 0) for k in range(2)]
        elif entry.split is Split.QKV:
            whole = _concat(pieces, 0)
            runs = [self.tensors.runs(entry, index) for index in range(len(shapes))]
            tensors = [_concat([whole[first : first + rows] for _, first, rows in run], 0) for run in runs]
        else:
            tensors = [_concat(pieces, 1 if entry.split is Split.ROW else 0)]
        if entry.split is Split.VOCAB:
            tensors = [tensors[0][: shapes[0][0]]]
        assert [tuple(t.shape) for t in tensors] == list(shapes), (entry.megatron, [t.shape for t in tensors], shapes)
        return tensors

    def _broadcast(self, bucket: Sequence[_Slot], whole: list[Tensor] | None, owner: int) -> Iterator[Tensor]:
        """The bucket's complete tensors on every stage."""
        group = self.parallel.pp_group
        if group.size() == 1:
            assert whole is not None
            return iter(whole)
        entries = [self.entry(slot) for slot in bucket]
        shapes = [
            shape
            for slot, entry in zip(bucket, entries, strict=True)
            for _ in range(self.copies(slot))
            for shape in self.tensors.shapes(entry)
        ]
        if whole is not None:
            flat = torch.cat([tensor.reshape(-1) for tensor in whole])
        else:
            device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
            dtype = self.tensors.dtype(entries[0])
            flat = torch.empty(sum(math.prod(shape) for shape in shapes), dtype=dtype, device=device)
        dist.broadcast(flat, dist.get_global_rank(group, owner), group=group)
        pieces = torch.split(flat, [math.prod(shape) for shape in shapes])
        return (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))


def _served(parameter: Any) -> Tensor:
    """The published weight: the parameter, or the result of its published weight functions."""
    weight: Tensor = parameter.served() if hasattr(parameter, "served") else parameter
    return weight.detach()


def _computed(parameter: Any) -> Tensor:
    """The weight that the model computes with."""
    weight: Tensor = parameter.computed() if hasattr(parameter, "computed") else parameter
    return weight.detach()


def _concat(pieces: Sequence[Tensor], axis: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), axis)

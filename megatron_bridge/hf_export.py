"""This rank's shards -> a stream of whole Hugging Face tensors: what is published to the rollout.

Every rank yields every tensor; draining the stream is collective. Shards travel in buckets of one kind: one all-gather
a bucket (over tensor-parallel ranks; over expert-parallel ranks for experts, where one local expert stands for one on
each rank), then one broadcast from the pipeline stage that owns the bucket. Values are the parameters cast to the
checkpoint's dtype; nothing else touches them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_bridge.agree import gather
from megatron_bridge.families.base import Entry, Family, HFConfig, Split, TensorMap
from megatron_bridge.param_names import layer_renamer
from megatron_bridge.te_names import is_extra
from miles_like.types import NamedTensor

BUCKET_BYTES = 256 << 20
_Value = Callable[[Any], Tensor]  # of a parameter
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
    """What must agree for slots to travel together; also the order of the stream."""

    stage: int
    per_expert: bool
    replicated: bool
    fp32: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """A parameter on each rank of one stage: the same one, or for a local expert one expert on each EP rank."""

    stage: int
    entry_index: int
    layer: int | None
    local_expert: int | None
    tensor: Tensor | None  # this rank's shard, the parameter itself; None where another stage owns it


def export_hf(
    model_chunks: Sequence[torch.nn.Module],
    family: Family,
    hf_config: HFConfig,
    parallel: ExportGroups,
    *,
    mtp: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[NamedTensor]:
    """Every Hugging Face tensor of the model, once, in an order that is the same on all ranks.

    `model_chunks` are this rank's GPTModels of either spec (one a virtual stage), wrapped or not. `mtp`: they hold
    the draft layers too; what a draft layer's checkpoint repeats (embedding, head) is repeated here. `bucket_bytes`
    bounds what is gathered at once, in bytes of whole tensors. A yielded tensor may share memory with its bucket or
    with the model: use or copy it before the next optimizer step. gate_proj is followed by its up_proj.

    Raises ValueError for a parameter that the family's table does not know, and AssertionError where the stages
    together do not hold every tensor of the model.
    """
    return ExportPlan(model_chunks, family, hf_config, parallel, mtp=mtp, bucket_bytes=bucket_bytes).export()


class ExportPlan:
    """Which parameters travel together, found once for a model that is exported after every step. Collective to make,
    with pipeline stages. Arguments and errors as of `export_hf`."""

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
        self._exporter = exporter = _Exporter(tensors, parallel)
        slots = sorted(_unique(_all_slots(model_chunks, tensors, parallel)), key=exporter.key)
        covered = sum(exporter.copies(slot) * len(exporter.entry(slot).hf) for slot in slots)
        expected = sum(1 for _ in tensors.places())
        assert covered == expected, f"the model's stages hold {covered} tensors, the config has {expected}"
        self._buckets = [
            bucket for _, group in groupby(slots, key=exporter.key) for bucket in exporter.buckets(group, bucket_bytes)
        ]

    def names(self) -> Iterator[str]:
        """Of the stream's tensors, in its order; nothing is moved."""
        for bucket in self._buckets:
            yield from self._exporter.names(bucket)

    def export(self, *, computed: bool = False) -> Iterator[NamedTensor]:
        """The stream, from the parameters' values now; `computed`: of what the model computes with, rounded where it
        is trained so. Draining it is collective."""
        for bucket in self._buckets:
            yield from self._exporter.export(bucket, _computed if computed else _served)


def _all_slots(chunks: Sequence[torch.nn.Module], tensors: TensorMap, parallel: ExportGroups) -> list[_Slot]:
    """Slots of every stage, in the same order on all ranks."""
    stages, stage = parallel.pp_group.size(), parallel.pp_group.rank()
    own = [slot for chunk in chunks for slot in _local_slots(chunk, tensors, stage)]
    if stages == 1:
        return own
    described = gather([(slot.entry_index, slot.layer, slot.local_expert) for slot in own], parallel.pp_group)
    slots = []
    for s, listed in enumerate(described):
        remote = [
            _Slot(stage=s, entry_index=index, layer=layer, local_expert=expert, tensor=None)
            for index, layer, expert in listed
        ]
        slots.extend(own if s == stage else remote)
    return slots


def _unique(slots: Iterable[_Slot]) -> list[_Slot]:
    """The first of each: a last stage with draft layers holds the first stage's embedding again."""
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
        place = tensors.parts_of(name)[0]
        yield _Slot(
            stage=stage,
            entry_index=indexes[id(place.entry)],
            layer=place.layer,
            local_expert=int(expert[1]) if expert else None,
            tensor=value,
        )


class _Exporter:
    """Moves buckets; holds nothing between them."""

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

    def copies(self, slot: _Slot) -> int:
        """Megatron parameters a slot stands for."""
        return self.parallel.ep_group.size() if self.entry(slot).per_expert else 1

    def buckets(self, slots: Iterable[_Slot], limit: int) -> Iterator[list[_Slot]]:
        bucket: list[_Slot] = []
        size = 0
        for slot in slots:
            entry = self.entry(slot)
            elements = self.copies(slot) * math.prod(self.tensors.megatron_shape(entry))
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
        parts = self._broadcast(bucket, whole, owner)
        for slot in bucket:
            for name, *copies in self._names(slot):
                part = next(parts)
                yield NamedTensor(name, part)
                yield from (NamedTensor(copy, part) for copy in copies)

    def names(self, bucket: Sequence[_Slot]) -> Iterator[str]:
        """What `export` yields, by name."""
        yield from (name for slot in bucket for names in self._names(slot) for name in names)

    def _names(self, slot: _Slot) -> Iterator[tuple[str, ...]]:
        """Of each tensor of a slot, its name and the names of its copies."""
        entry = self.entry(slot)
        local = self.tensors.experts_of(entry) // self.copies(slot)
        for rank in range(self.copies(slot)):
            expert = None if slot.local_expert is None else rank * local + slot.local_expert
            for pattern in entry.hf:
                yield pattern.format(i=slot.layer, e=expert), *self.tensors.copies_of(entry)

    def _gather(self, bucket: Sequence[_Slot], value: _Value) -> list[Tensor]:
        """Whole tensors of a bucket of this rank's stage, in the order of the names."""
        first = self.entry(bucket[0])
        dtype = self.tensors.dtype(first)
        shards = [value(slot.tensor).to(dtype) for slot in bucket if slot.tensor is not None]
        ranks = [shards]
        if first.per_expert:
            ranks = self._all_gather(ranks, self.parallel.etp_group)
            tensor_ranks = len(ranks)
            ranks = self._all_gather(ranks, self.parallel.ep_group)
        else:
            if first.split is not Split.REPLICATED:
                ranks = self._all_gather(ranks, self.parallel.tp_group)
            tensor_ranks = len(ranks)
        whole: list[Tensor] = []
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
        """Shards in rank order -> the whole Hugging Face tensors of one Megatron parameter."""
        shapes = self.tensors.shapes(entry)
        if entry.split is Split.REPLICATED:
            parts = [pieces[0]]
        elif entry.split is Split.GATE_UP:
            halves = [piece.chunk(2) for piece in pieces]
            parts = [_concat([half[k] for half in halves], 0) for k in range(2)]
        elif entry.split is Split.QKV:
            whole = _concat(pieces, 0)
            runs = [self.tensors.runs(entry, part) for part in range(len(shapes))]
            parts = [_concat([whole[first : first + rows] for _, first, rows in run], 0) for run in runs]
        else:
            parts = [_concat(pieces, 1 if entry.split is Split.ROW else 0)]
        if entry.split is Split.VOCAB:
            parts = [parts[0][: shapes[0][0]]]
        assert [tuple(p.shape) for p in parts] == list(shapes), (entry.megatron, [p.shape for p in parts], shapes)
        return parts

    def _broadcast(self, bucket: Sequence[_Slot], whole: list[Tensor] | None, owner: int) -> Iterator[Tensor]:
        """The bucket's whole tensors on every stage."""
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
            flat = torch.cat([part.reshape(-1) for part in whole])
        else:
            device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
            dtype = self.tensors.dtype(entries[0])
            flat = torch.empty(sum(math.prod(shape) for shape in shapes), dtype=dtype, device=device)
        dist.broadcast(flat, dist.get_global_rank(group, owner), group=group)
        pieces = torch.split(flat, [math.prod(shape) for shape in shapes])
        return (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))


def _served(parameter: Any) -> Tensor:
    """What is published, and encoded then: the parameter, or the effective weight made of it."""
    return (parameter.served() if hasattr(parameter, "served") else parameter).detach()


def _computed(parameter: Any) -> Tensor:
    """What the model computes with."""
    return (parameter.computed() if hasattr(parameter, "computed") else parameter).detach()


def _concat(pieces: Sequence[Tensor], axis: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), axis)

"""This rank's shards of the published weights: which rectangle of which Hugging Face tensor each parameter holds.

The same table is read as by the export, without communication. Together the regions of the ranks of one model replica
cover each tensor once, or are equal copies; put together they are what `ExportPlan.export` yields.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_bridge.families.base import Entry, Split, TensorMap
from megatron_bridge.weights.export import ExportGroups, ExportPlan, _local_slots, _served, _Slot, _unique
from miles_like.types import NamedTensor, WeightRegion


class _Run(NamedTuple):
    """Rows that are contiguous in a Hugging Face tensor and in this rank's parameter."""

    theirs: int  # first row in the whole tensor
    ours: int  # first row in the parameter
    rows: int


class _Held(NamedTuple):
    """Where the values of a region are."""

    slot: _Slot
    runs: tuple[_Run, ...]  # in the order of the rows of the tensor


class LocalShards:
    """The regions of one rank. `plan` is the export of the same model."""

    def __init__(
        self, model_chunks: Sequence[torch.nn.Module], tensors: TensorMap, parallel: ExportGroups, plan: ExportPlan
    ) -> None:
        self._tensors, self._parallel, self._plan = tensors, parallel, plan
        self._stage = parallel.pp_group.rank()
        self.names: tuple[str, ...] = tuple(plan.names())
        self._held: list[_Held] = []
        self.regions: list[WeightRegion] = []
        slots = _unique(slot for chunk in model_chunks for slot in _local_slots(chunk, tensors, self._stage))
        for slot in slots:
            for region, held in self._of(slot):
                self.regions.append(region)
                self._held.append(held)

    def values(self, numbers: Iterable[int]) -> Iterator[Tensor]:
        """The current values of these `regions`, [rows, columns], in the dtype in which they are published. They may
        share memory with the parameters. Of one with an adapter or of another dtype the value is made once for
        neighbouring numbers."""
        last: tuple[_Slot, Tensor] | None = None
        for number in numbers:
            slot, runs = self._held[number]
            if last is None or last[0] is not slot:
                last = slot, self._value(slot)
            pieces = [last[1][run.ours : run.ours + run.rows] for run in runs]
            yield pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def gathered(self, names: Container[str]) -> Iterator[NamedTensor]:
        """As `ExportPlan.export` of these names. Draining it is collective."""
        return self._plan.export(only=names)

    def _value(self, slot: _Slot) -> Tensor:
        entry = self._tensors.entries[slot.entry_index]
        value = _served(slot.tensor).to(self._tensors.dtype(entry))
        return value.view(len(value), -1)

    def _of(self, slot: _Slot) -> Iterator[tuple[WeightRegion, _Held]]:
        """The regions of a parameter, a tensor after the other."""
        tensors, parameter = self._tensors, slot.tensor
        entry = tensors.entries[slot.entry_index]
        assert parameter is not None
        dtype = str(tensors.dtype(entry)).removeprefix("torch.")
        expert = None
        if slot.local_expert is not None:
            local = tensors.experts_of(entry) // self._parallel.ep_group.size()
            expert = self._parallel.ep_group.rank() * local + slot.local_expert
        for index, (pattern, shape) in enumerate(zip(entry.hf, tensors.shapes(entry), strict=True)):
            columns = self._columns(entry, shape)
            for runs in _joined(self._runs(entry, index, len(parameter))):
                rows = runs[0].theirs, runs[-1].theirs + runs[-1].rows
                for name in (pattern.format(i=slot.layer, e=expert), *tensors.copies_of(entry)):
                    yield WeightRegion(name, shape, dtype, rows, columns, self._stage), _Held(slot, runs)

    def _part(self, entry: Entry) -> tuple[int, int]:
        """(this rank's number, ranks) of those that the parameter is divided over."""
        if entry.split is Split.REPLICATED:
            return 0, 1
        group = self._parallel.etp_group if entry.per_expert else self._parallel.tp_group
        return group.rank(), group.size()

    def _columns(self, entry: Entry, shape: tuple[int, ...]) -> tuple[int, int]:
        columns = shape[1] if len(shape) > 1 else 1
        if entry.split is not Split.ROW:
            return 0, columns
        rank, ranks = self._part(entry)
        return columns * rank // ranks, columns * (rank + 1) // ranks

    def _runs(self, entry: Entry, index: int, held: int) -> Iterator[_Run]:
        """The rows of tensor `index` of the entry that this rank holds. held: rows of its parameter."""
        rank, ranks = self._part(entry)
        rows = self._tensors.shapes(entry)[index][0]
        match entry.split:
            case Split.REPLICATED | Split.ROW:
                yield _Run(0, 0, rows)
            case Split.GATE_UP:
                yield _Run(rank * rows // ranks, index * (held // 2), rows // ranks)
            case Split.COLUMN:
                yield _Run(rank * held, 0, held)
            case Split.VOCAB:  # the last ranks may hold rows after the vocabulary
                yield _Run(rank * held, 0, max(0, min(held, rows - rank * held)))
            case Split.QKV:
                for theirs, whole, count in self._tensors.runs(entry, index):
                    first, last = max(whole, rank * held), min(whole + count, (rank + 1) * held)
                    yield _Run(theirs + first - whole, first - rank * held, max(0, last - first))


def _joined(runs: Iterator[_Run]) -> Iterator[tuple[_Run, ...]]:
    """Runs in groups that are contiguous in the whole tensor, without empty ones."""
    group: list[_Run] = []
    for run in runs:
        if not run.rows:
            continue
        if group and group[-1].theirs + group[-1].rows != run.theirs:
            yield tuple(group)
            group = []
        group.append(run)
    if group:
        yield tuple(group)

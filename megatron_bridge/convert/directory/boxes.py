"""Splits Hugging Face tensors into boxes of checkpoint tensors, and gives the checkpoint keys.

A checkpoint of any grid loads in any layout; `Grid` chooses the boundaries of one tensor-parallel layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_bridge.families.base import Entry, Place, Split, TensorMap


@dataclass(frozen=True, slots=True)
class Grid:
    """The layout whose ranks read only their own bytes."""

    tp: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.etp) < 1:
            raise ValueError(f"tp = {self.tp}, etp = {self.etp}: both must be at least 1")


@dataclass(frozen=True, slots=True)
class Box:
    """Rows [first, last) of one Hugging Face tensor, all columns or [columns], as a box of a checkpoint tensor."""

    key: str
    shape: tuple[int, ...]  # of the complete checkpoint tensor
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    hf_name: str
    first: int
    last: int
    columns: tuple[int, int] | None = None


def checkpoint_key(place: Place) -> str:
    """Key of the checkpoint tensor that holds a Hugging Face tensor; all experts of a layer share one."""
    return checkpoint_key_of(place.entry, place.layer, place.depth)


def checkpoint_key_of(entry: Entry, layer: int | None, depth: int | None) -> str:
    """Key of the checkpoint tensor of an entry in a layer."""
    pattern = entry.stored or entry.megatron.replace(".local_experts.{e}.", ".experts.")
    return pattern.format(i=layer, j=depth)


def checkpoint_shape(tensors: TensorMap, place: Place) -> tuple[int, ...]:
    """Shape of that checkpoint tensor, with a leading dimension of experts if it holds them."""
    lead = () if place.expert is None else (tensors.dims["experts"],)
    return (*lead, *tensors.megatron_shape(place.entry))


def extra_state_keys(tensors: TensorMap) -> Iterator[str]:
    """Keys of the `_extra_state` objects that stock loading requires: one per parallel linear and expert."""
    for entry in tensors.entries:
        if entry.linear:
            base = entry.megatron.removesuffix(".weight").replace(".local_experts.{e}.", ".experts.")
            count = tensors.experts_of(entry)
            for layer in tensors.layers_of(entry):
                for e in range(count):
                    yield f"{base.format(i=layer, j=tensors.depth(layer))}._extra_state/shard_{e}_{count}"


def boxes(place: Place, tensors: TensorMap, grid: Grid, *, chunk_bytes: int, align: int = 1) -> Iterator[Box]:
    """The boxes of one Hugging Face tensor in row order; boxes with the same rows are adjacent.

    All boxes with the same rows take at most `chunk_bytes` together, but have at least `align` rows, and a multiple of
    `align` rows where the grid allows. Raises ValueError when the grid does not divide the tensor.
    """
    dtype, rest = tensors.dtype(place.entry), place.shape[1:]
    lead = () if place.expert is None else (place.expert,)
    shape = checkpoint_shape(tensors, place)
    step = max(1, chunk_bytes // (math.prod(rest) * dtype.itemsize))
    step = max(align, step // align * align)
    line = _rows_of_a_rank(tensors, place, grid)
    columns = _columns(place, grid)
    for start, target, rows in tensors.runs(place.entry, place.index):
        for a, b in _cut(target, target + rows, line, step):
            for column in columns:
                tail = rest if column is None else (column[1] - column[0], *rest[1:])
                yield Box(
                    key=checkpoint_key(place),
                    shape=shape,
                    offset=(*lead, a, *((column[0] if column else 0, *(0 for _ in rest[1:])) if rest else ())),
                    sizes=(*(1 for _ in lead), b - a, *tail),
                    dtype=dtype,
                    hf_name=place.hf_name,
                    first=start + a - target,
                    last=start + b - target,
                    columns=column,
                )


def _cut(a: int, b: int, line: int, step: int) -> Iterator[tuple[int, int]]:
    """Split [a, b) into runs of at most `step` that do not cross a multiple of `line`."""
    while a < b:
        end = min(b, a + step, (a // line + 1) * line)
        yield a, end
        a = end


def _ranks(entry: Entry, grid: Grid) -> int:
    return grid.etp if entry.per_expert else grid.tp


def _rows_of_a_rank(tensors: TensorMap, place: Place, grid: Grid) -> int:
    """Consecutive rows of the Megatron parameter on one rank."""
    rows = tensors.megatron_shape(place.entry)[0]
    if place.entry.split in (Split.REPLICATED, Split.ROW):
        return rows
    halves = len(place.entry.hf) if place.entry.split is Split.GATE_UP else 1
    return _share(rows // halves, _ranks(place.entry, grid), "rows", place.hf_name)


def _columns(place: Place, grid: Grid) -> list[tuple[int, int] | None]:
    ranks = _ranks(place.entry, grid)
    if place.entry.split is not Split.ROW or ranks == 1:
        return [None]
    share = _share(place.shape[1], ranks, "columns", place.hf_name)
    return list(itertools.pairwise(range(0, place.shape[1] + 1, share)))


def _share(size: int, ranks: int, what: str, name: str) -> int:
    if size % ranks:
        raise ValueError(
            f"{size} {what} of {name!r} are not divisible by {ranks} tensor-parallel ranks: choose a divisor"
        )
    return size // ranks

"""The tensors, bytes and files of a converted directory that the ranks of a layout read. Arithmetic only, no megatron.

The rules are megatron-core 0.16.1's: ranks are numbered in the order tp, cp, dp, pp (etp, ep, expert dp, pp for routed
experts), layers are divided over the stages as `get_transformer_layer_offset` does, and the last stage holds the
embedding again if it is the output head too or if there are draft layers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

from megatron_bridge.config import ParallelConfig
from megatron_bridge.convert.directory.boxes import checkpoint_key_of
from megatron_bridge.convert.directory.manifest import MANIFEST, Manifest, Piece
from megatron_bridge.families.base import Entry, Split, TensorMap, Where

COMPANION_PREFIX = "hf/"  # files for the conversion back, which no rank opens


class Position(NamedTuple):
    """A rank's coordinates, as far as they determine its weights."""

    pp: int
    tp: int
    ep: int
    etp: int


class Share(NamedTuple):
    """Part of a Megatron parameter: experts, rows and columns, each [first, last)."""

    experts: tuple[int, int]  # (0, 1) for a parameter that is not of an expert
    rows: tuple[int, int]
    columns: tuple[int, int] | None  # None: all


def position(layout: ParallelConfig, rank: int) -> Position:
    """The coordinates of a rank of the layout."""
    stage_size = layout.tp * layout.cp * layout.dp
    return Position(
        pp=rank // stage_size, tp=rank % layout.tp, ep=rank // layout.etp % layout.ep, etp=rank % layout.etp
    )


def stages_by_layer(layout: ParallelConfig, layers: int) -> list[int]:
    """The pipeline stage of each decoder layer. The layout fits the model, as `check_layout` checks."""
    ends = [n for n in (layout.first_stage_layers, layout.last_stage_layers) if n is not None]
    between = layout.pp - len(ends)
    sizes = [(layers - sum(ends)) // between if between else 0] * layout.pp
    if layout.first_stage_layers is not None:
        sizes[0] = layout.first_stage_layers
    if layout.last_stage_layers is not None:
        sizes[-1] = layout.last_stage_layers
    # virtual stages: every stage has one run of consecutive layers in each of `vpp` rounds
    return [stage for _ in range(layout.vpp) for stage, n in enumerate(sizes) for _ in range(n // layout.vpp)]


def shares(
    tensors: TensorMap, layout: ParallelConfig, positions: Collection[Position]
) -> Iterator[tuple[str, Entry, frozenset[Share]]]:
    """(checkpoint key, entry, distinct shares that the ranks at `positions` hold) for each tensor that one of them
    holds. Shares of one tensor are disjoint."""
    stage_of = stages_by_layer(layout, tensors.dims["layers"])
    for entry in tensors.entries:
        for layer in tensors.layers_of(entry):
            stages = _stages(tensors, layout, entry, None if layer is None else stage_of[layer : layer + 1])
            found = frozenset(
                share for at in positions if at.pp in stages for share in _shares_at(tensors, layout, entry, at)
            )
            if found:
                yield checkpoint_key_of(entry, layer, tensors.depth(layer)), entry, found


def bytes_read(tensors: TensorMap, layout: ParallelConfig, ranks: Collection[int]) -> int:
    """Bytes of tensor data that these ranks read together, each byte counted once."""
    positions = {position(layout, rank) for rank in ranks}
    return sum(
        _elements(tensors, entry, share) * tensors.dtype(entry).itemsize
        for _, entry, found in shares(tensors, layout, positions)
        for share in found
    )


def files_read(
    manifest: Manifest, tensors: TensorMap, layout: ParallelConfig, ranks: Collection[int]
) -> frozenset[str]:
    """Names of the files of a converted directory that these ranks open: data files that hold a part of what one of
    them loads, and the small files that every rank reads. Empty for no ranks.

    A tensor that the directory lacks, as the scalar head of a language model, is in no file.
    """
    if not ranks:
        return frozenset()
    data = {piece.file for fact in manifest.tensors.values() for piece in fact.pieces}
    found = {name for name in manifest.files if name not in data and not name.startswith(COMPANION_PREFIX)}
    return frozenset({MANIFEST, *found, *(p.file for p in pieces_read(manifest, tensors, layout, ranks))})


def pieces_read(
    manifest: Manifest, tensors: TensorMap, layout: ParallelConfig, ranks: Collection[int]
) -> Iterator[Piece]:
    """The pieces that hold a part of what one of these ranks loads, each once."""
    for key, entry, held in shares(tensors, layout, {position(layout, rank) for rank in ranks}):
        fact = manifest.tensors.get(key)
        for piece in fact.pieces if fact is not None else ():
            if any(_meets(piece, share, entry.per_expert) for share in held):
                yield piece


def _stages(tensors: TensorMap, layout: ParallelConfig, entry: Entry, of_layer: list[int] | None) -> set[int]:
    """The pipeline stages that hold the entry. of_layer: the stage of its layer, empty for a draft layer."""
    last = layout.pp - 1
    if entry.where is Where.TOP and entry.megatron.startswith("embedding."):
        return {0, last} if tensors.draft_layers or tensors.tied else {0}
    return set(of_layer) if of_layer else {last}


def _shares_at(tensors: TensorMap, layout: ParallelConfig, entry: Entry, at: Position) -> Iterator[Share]:
    """What a rank of the entry's stage holds of it; gate and up projections are two shares."""
    rows, *columns = tensors.megatron_shape(entry)
    size, rank = (layout.etp, at.etp) if entry.per_expert else (layout.tp, at.tp)
    local = tensors.experts_of(entry) // layout.ep
    experts = (at.ep * local, (at.ep + 1) * local) if entry.per_expert else (0, 1)
    if entry.split is Split.REPLICATED:
        yield Share(experts, (0, rows), None)
    elif entry.split is Split.ROW:
        yield Share(experts, (0, rows), _part(0, columns[0], size, rank))
    else:
        halves = len(entry.hf) if entry.split is Split.GATE_UP else 1
        for half in range(halves):
            yield Share(experts, _part(half * rows // halves, rows // halves, size, rank), None)


def _part(start: int, length: int, size: int, rank: int) -> tuple[int, int]:
    return start + length * rank // size, start + length * (rank + 1) // size


def _elements(tensors: TensorMap, entry: Entry, share: Share) -> int:
    rest = tensors.megatron_shape(entry)[1:]
    if share.columns is not None:
        rest = (share.columns[1] - share.columns[0], *rest[1:])
    experts, rows = share.experts[1] - share.experts[0], share.rows[1] - share.rows[0]
    return experts * rows * math.prod(rest)


def _meets(piece: Piece, share: Share, per_expert: bool) -> bool:
    """Whether a piece has an element of the share."""
    runs = [share.experts] if per_expert else []
    runs += [share.rows] if share.columns is None else [share.rows, share.columns]
    return all(a < o + n and o < b for (a, b), o, n in zip(runs, piece.offset, piece.sizes, strict=False))

"""The tensors of a publication in the order in which the trainer exports them, from the family's table and the layout.

The order is that of `megatron_bridge/weights/export.py`: pipeline stage by stage, and in a stage first what is not an
expert's; in each of these groups layer by layer. Draft layers are not published here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_bridge.config import ParallelConfig
from megatron_bridge.families.base import Entry, HFConfig, Split, TensorMap, Where
from megatron_bridge.families.registry import family_of
from miles_like.timing.engine import EngineSetup
from miles_like.timing.of_run import element_bytes
from miles_like.timing.train import stage_layers
from quant.spec import QuantSpec


class Key(NamedTuple):
    """Tensors with equal keys may share a bucket; keys also give the order."""

    stage: int
    per_expert: bool
    replicated: bool
    """Every tensor-parallel rank of the trainer holds them whole."""
    fp32: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Tensors that are gathered together: those of one Megatron parameter, or for experts of one local expert of every
    expert-parallel rank."""

    key: Key
    names: tuple[str, ...]
    full: float
    """Bytes in the checkpoint's dtype."""
    encoded: float
    """Bytes as published, with scales."""
    slice: float
    """Of these, bytes that one rank of a server keeps."""
    whole: float
    """Of the slice, bytes of tensors that every rank of a server keeps whole."""
    kept: float
    """Number of these tensors of which a server's rank keeps a part, on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Sums over the slots of a bucket, with their units."""

    key: Key
    tensors: int
    full: float
    encoded: float
    slice: float
    whole: float
    kept: float


def publication(hf: HFConfig, parallel: ParallelConfig, engine: EngineSetup, spec: QuantSpec | None) -> list[Slot]:
    """The slots of a publication to servers of this kind, in its order. spec: of the served checkpoint; None: BF16.
    Raises ValueError as `Family.bind`."""
    tensors = family_of(hf).bind(hf)
    stages = {i: s for s, layers in enumerate(stage_layers(tensors.dims["layers"], parallel)) for i in layers}
    last, local = parallel.pp - 1, tensors.dims.get("experts", 0) // parallel.ep
    found: list[tuple[Key, tuple[float, int, int], Slot]] = []
    for index, entry in enumerate(tensors.entries):
        for layer in tensors.layers_of(entry):
            first = entry.megatron.startswith("embedding.")
            stage = stages[layer] if layer is not None else 0 if first else last
            fp32 = tensors.dtype(entry).itemsize == 4
            key = Key(stage, entry.per_expert, entry.split is Split.REPLICATED, fp32)
            place = float(layer) if layer is not None else -math.inf if first else math.inf
            experts = range(local) if entry.per_expert else (None,)
            one = _slot(tensors, entry, key, layer, engine, spec)
            for expert in experts:
                numbers = [rank * local + expert for rank in range(parallel.ep)] if expert is not None else [None]
                names = tuple(p.format(i=layer, e=e) for e in numbers for p in entry.hf)
                found.append((key, (place, expert or 0, index), _times(one, names)))
    return [slot for _, _, slot in sorted(found, key=lambda item: item[:2])]


def _times(one: Slot, names: tuple[str, ...]) -> Slot:
    """As many tensors like those of `one` as there are names."""
    n = len(names) / len(one.names)
    sums = (n * x for x in (one.full, one.encoded, one.slice, one.whole, one.kept))
    full, encoded, sliced, whole, kept = sums
    return Slot(key=one.key, names=names, full=full, encoded=encoded, slice=sliced, whole=whole, kept=kept)


def _slot(
    tensors: TensorMap, entry: Entry, key: Key, layer: int | None, engine: EngineSetup, spec: QuantSpec | None
) -> Slot:
    """Of one expert, or of the entry's only parameter in this layer."""
    expert, size = (0 if entry.per_expert else None), tensors.dtype(entry).itemsize
    full = encoded = sliced = whole = 0.0
    names = tuple(pattern.format(i=layer, e=expert) for pattern in entry.hf)
    for index, (name, shape) in enumerate(zip(names, tensors.shapes(entry), strict=True)):
        elements = math.prod(shape)
        stored = elements * (element_bytes(spec) if spec is not None and spec.covers(name, shape) else size)
        full += elements * size
        encoded += stored
        parts = _parts(tensors, entry, index, engine)
        sliced += stored / parts
        whole += stored if parts == 1 else 0.0
    kept = len(names) / (engine.ep if entry.per_expert else 1)
    return Slot(key=key, names=names, full=full, encoded=encoded, slice=sliced, whole=whole, kept=kept)


def _parts(tensors: TensorMap, entry: Entry, index: int, engine: EngineSetup) -> float:
    """Ranks of a server among which a tensor is divided; experts: whole ones or slices. 1: each has it whole."""
    if entry.split is Split.REPLICATED:
        return 1
    if entry.per_expert:
        return engine.tp
    if ".shared_experts." in entry.megatron:
        return 1 if engine.deepep else engine.tp
    if ".mlp." in entry.megatron and entry.where is Where.DENSE:
        return 1 if engine.replicated_dense else engine.tp
    if ".self_attention." in entry.megatron or entry.megatron.startswith("embedding."):
        if entry.split is Split.QKV and index > 0:
            return min(engine.attention_tp, int(tensors.dims["kv_heads"]))
        return engine.attention_tp
    return engine.tp


def buckets(slots: Iterable[Slot], limit: float) -> Iterator[Bucket]:
    """Consecutive slots with one key, up to `limit` bytes before encoding; a larger slot has its own bucket."""
    held: list[Slot] = []
    size = 0.0
    for slot in slots:
        if held and (slot.key != held[0].key or size + slot.full > limit):
            yield bucket_of(held)
            held, size = [], 0.0
        held.append(slot)
        size += slot.full
    if held:
        yield bucket_of(held)


def bucket_of(slots: list[Slot]) -> Bucket:
    return Bucket(
        key=slots[0].key,
        tensors=sum(len(slot.names) for slot in slots),
        full=sum(slot.full for slot in slots),
        encoded=sum(slot.encoded for slot in slots),
        slice=sum(slot.slice for slot in slots),
        whole=sum(slot.whole for slot in slots),
        kept=sum(slot.kept for slot in slots),
    )

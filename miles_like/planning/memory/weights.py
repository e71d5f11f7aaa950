"""How many elements of each kind one rank of a pipeline stage holds, from the family's table of tensors.

Shapes and their sharding are those of `TensorMap`, from which checkpoints are converted and weights published; so a
parameter that the plan forgot would also be missing there.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

from megatron_bridge.config import ParallelConfig, TrainerConfig
from megatron_bridge.convert.directory.rank_reads import stages_by_layer
from megatron_bridge.families.base import Entry, HFConfig, Precision, Split, Where
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.precision import trained_spec
from megatron_bridge.plan.resolve import trained_config

Kind = Literal["dense", "expert"]  # experts have separate gradient buffers and optimizers
_LORA = {"attention": ".self_attention.", "experts": ".experts.", "shared_experts": ".shared_experts."}


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Parameters of equal shape that one rank holds, such as those of its local experts in one layer."""

    kind: Kind
    elements: int  # of one of them
    count: int = 1
    trained: bool = True
    rounded: bool = False  # a rounded copy is kept for quantization-aware training
    linear: bool = False  # a matrix product: has an FP8 copy where products are in FP8
    fp32: bool = False  # a buffer that stays FP32
    vector: bool = False  # without weight decay: it comes last in its optimizer
    alone: bool = False  # in its bucket of gradients: an embedding that the first and the last stage share

    @property
    def total(self) -> int:
        return self.elements * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A parameter of the whole model: one layer's of an entry."""

    entry: Entry
    layer: int | None
    frozen: bool
    rounded: bool


@dataclass(frozen=True, kw_only=True)
class StageWeights:
    """Parameters that one rank of a pipeline stage holds, by virtual stage (chunk)."""

    stage: int
    layers: tuple[tuple[int, ...], ...]  # of each chunk
    modules: tuple[tuple[Held, ...], ...]  # of each chunk, as megatron registers them

    @cached_property
    def chunks(self) -> tuple[tuple[Held, ...], ...]:
        """The parameters of each chunk; equal ones of all its layers are counted together."""
        counted = (Counter(chunk) for chunk in self.modules)
        return tuple(tuple(replace(h, count=h.count * n) for h, n in found.items()) for found in counted)

    @property
    def held(self) -> Iterator[Held]:
        return itertools.chain.from_iterable(self.chunks)

    def elements(self, kind: Kind | None = None, *, trained: bool | None = None) -> int:
        """Number of elements of the parameters, without the routers' FP32 buffers."""
        return sum(
            h.total
            for h in self.held
            if not h.fp32 and (kind is None or h.kind == kind) and (trained is None or h.trained == trained)
        )


class ModelWeights:
    """The parameters of the model that the ranks of one `TrainerConfig` train, whatever their layout."""

    def __init__(self, config: TrainerConfig, hf: HFConfig) -> None:
        """hf: config.json of the served checkpoint. Raises ValueError as `trained_config` and `trained_spec`."""
        self.config, self.hf = config, trained_config(config, hf)
        self.family = family_of(self.hf)
        self.tensors = self.family.bind(self.hf, mtp=config.mtp_coefficient > 0)
        self.spec = trained_spec(config, self.hf) if config.precision.qat else None

    @cached_property
    def dims(self) -> Mapping[str, int]:
        return self.tensors.dims

    @cached_property
    def moe_layers(self) -> frozenset[int]:
        return self.tensors.moe_layers

    @cached_property
    def _by_layer(self) -> Mapping[int | None, tuple[_Row, ...]]:
        out: dict[int | None, list[_Row]] = {}
        for entry in self.tensors.entries:
            for layer in self.tensors.layers_of(entry):
                out.setdefault(layer, []).append(self._row(entry, layer))
        return {layer: _as_registered(layer, rows) for layer, rows in out.items()}

    def _row(self, entry: Entry, layer: int | None) -> _Row:
        expert, frozen = 0 if entry.per_expert else None, False
        if patterns := self.config.optimizer.frozen:
            name = entry.megatron.format(i=layer, e=expert, j=self.tensors.depth(layer))
            frozen = any(fnmatchcase(name, pattern) for pattern in patterns)
        return _Row(entry=entry, layer=layer, frozen=frozen, rounded=self._is_rounded(entry, layer, expert))

    def _is_rounded(self, entry: Entry, layer: int | None, expert: int | None) -> bool:
        """Whether fake_quant.py keeps a second copy: of a parameter with at least one tensor that is quantized, except
        the head (`_covered`, `_matrices`)."""
        if self.spec is None or entry.megatron.startswith("output_layer."):
            return False
        names = (pattern.format(i=layer, e=expert) for pattern in entry.hf)
        return any(self.spec.covers(n, s) for n, s in zip(names, self.tensors.shapes(entry), strict=True))

    def stages(self, layout: ParallelConfig) -> tuple[StageWeights, ...]:
        """One rank of each pipeline stage of a layout that fits the model."""
        held = _HeldRows(self, layout)
        return tuple(self._stage(layout, stage, held) for stage in range(layout.pp))

    def _stage(self, layout: ParallelConfig, stage: int, held: _HeldRows) -> StageWeights:
        layers = chunk_layers(layout, self.dims["layers"], stage)
        shared = layout.pp > 1 and bool(self.tensors.tied or self.tensors.draft_layers)
        modules = []
        for number, own in enumerate(layers):
            first = stage == 0 and number == 0
            last = stage == layout.pp - 1 and number == layout.vpp - 1
            rows = self._rows(own, first, last)
            if last and not first and shared:  # GPTModel has it as an embedding before draft layers, or as the head
                embedding = [row for row in self._by_layer[None] if _is_embedding(row.entry)]
                rows = [*embedding, *rows] if self.tensors.draft_layers else [*rows, *embedding]
            modules.append(tuple(h for row in rows for h in held.of(row, alone=shared and _is_embedding(row.entry))))
        return StageWeights(stage=stage, layers=layers, modules=tuple(modules))

    def entries(self, layout: ParallelConfig, stage: StageWeights) -> Iterator[Entry]:
        """The table's entry of each parameter of a stage, an entry of experts once for every layer."""
        for number, own in enumerate(stage.layers):
            first = stage.stage == 0 and number == 0
            last = stage.stage == layout.pp - 1 and number == layout.vpp - 1
            yield from (row.entry for row in self._rows(own, first, last))

    def local_experts(self, layout: ParallelConfig, entry: Entry) -> int:
        """Parameters of an entry that one rank holds in a layer."""
        return self.tensors.experts_of(entry) // (layout.ep if entry.per_expert else 1)

    def _rows(self, layers: Sequence[int], first: bool, last: bool) -> list[_Row]:
        """Of the chunk with these layers, in the order in which megatron registers their modules: embedding, layers,
        final norm, draft layers, output layer; in attention the output projection comes first."""
        drafts = self.tensors.draft_layers if last else ()
        rows = [row for layer in (*layers, *drafts) for row in self._by_layer[layer]]
        top = [row for row in self._by_layer[None] if self._is_at(row.entry, first, last)]
        before, after = [r for r in top if _is_embedding(r.entry)], [r for r in top if not _is_embedding(r.entry)]
        return [*before, *rows, *after]

    def _is_at(self, entry: Entry, first: bool, last: bool) -> bool:
        return first if _is_embedding(entry) else last

    def is_adapted(self, entry: Entry) -> bool:
        """Whether the linear has an adapter, as lora.py's `_targets`: linears of the decoder's layers."""
        lora, name = self.config.lora, entry.megatron
        if not lora.rank or not name.startswith("decoder.layers.") or not entry.linear:
            return False
        target = next((kind for kind, part in _LORA.items() if part in name), "mlp")
        return target in lora.targets

    def held_of(self, row: _Row, layout: ParallelConfig) -> Iterator[Held]:
        entry, lora = row.entry, self.config.lora
        shape = self.tensors.megatron_shape(entry)
        ranks = layout.etp if entry.per_expert else layout.tp
        elements = math.prod(shape) // (1 if entry.split is Split.REPLICATED else ranks)
        count = self.local_experts(layout, entry)
        kind: Kind = "expert" if entry.per_expert else "dense"
        fp32 = entry.precision is Precision.FP32
        adapted = self.is_adapted(entry)
        trains = self.config.trains and not (fp32 or row.frozen or lora.rank)
        yield Held(
            kind=kind,
            elements=elements,
            count=count,
            trained=trains,
            rounded=row.rounded,
            linear=entry.linear,
            fp32=fp32,
            vector=len(shape) == 1,
        )
        if adapted:
            for n in _adapters(entry.split, shape[0], shape[1], ranks, lora.rank):
                yield Held(kind=kind, elements=n, count=count, trained=self.config.trains)


class _HeldRows:
    """What one rank of a layout holds of each row; rows of an entry are equal in most layers."""

    def __init__(self, weights: ModelWeights, layout: ParallelConfig) -> None:
        self._weights, self._layout = weights, layout
        self._known: dict[tuple[int, bool, bool, bool], tuple[Held, ...]] = {}  # by the entry's id

    def of(self, row: _Row, *, alone: bool) -> tuple[Held, ...]:
        key = id(row.entry), row.frozen, row.rounded, alone
        if key not in self._known:
            held = self._weights.held_of(row, self._layout)
            self._known[key] = tuple(replace(h, alone=True) if alone else h for h in held)
        return self._known[key]


def trained_share(config: TrainerConfig, hf: HFConfig) -> float:
    """Share of the parameters of all ranks that have gradients: 1 without adapters and frozen weights."""
    stages = ModelWeights(config, hf).stages(config.parallel)
    return sum(s.elements(trained=True) for s in stages) / sum(s.elements() for s in stages)


def chunk_layers(layout: ParallelConfig, layers: int, stage: int) -> tuple[tuple[int, ...], ...]:
    """Global numbers of the decoder layers of each virtual stage of a pipeline stage."""
    own = [i for i, s in enumerate(stages_by_layer(layout, layers)) if s == stage]
    each = len(own) // layout.vpp
    return tuple(tuple(own[v * each : (v + 1) * each]) for v in range(layout.vpp))


def _is_embedding(entry: Entry) -> bool:
    return entry.where is Where.TOP and entry.megatron.startswith("embedding.")


def _as_registered(layer: int | None, rows: list[_Row]) -> tuple[_Row, ...]:
    return tuple(rows if layer is None else sorted(rows, key=_place_in_layer))


def _place_in_layer(row: _Row) -> int:
    """The table has the order of a layer's modules, but for attention's output projection."""
    name = row.entry.megatron
    return 0 if ".input_layernorm." in name else 1 if ".self_attention.linear_proj." in name else 2


def _adapters(split: Split, outputs: int, inputs: int, ranks: int, rank: int) -> tuple[int, int]:
    """Elements of A [r, in] and B [out, r] on one rank: the adapter at the sharded side of the matrix is sharded."""
    a, b = rank * inputs, rank * outputs
    if split is Split.ROW:
        return a // ranks, b
    return (a, b) if split is Split.REPLICATED else (a, b // ranks)

"""The description of a model family: the translation of its Hugging Face config to Megatron, and a table of its
tensors.

The table is read in both directions: from every Hugging Face tensor to its place in Megatron (checkpoint conversion),
and from every Megatron parameter to the Hugging Face tensors in it (publishing weights). In patterns `{i}` is the
global layer number, from 0, and `{e}` the global expert number. Draft layers (multi-token prediction) are numbered
after the last decoder layer; `{j}` numbers only them, from 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch

from megatron_bridge.families.keywords import TransformerKeywords

HFConfig = Mapping[str, Any]  # a parsed config.json
SCORE = "score.weight"  # name of the scalar head in transformers and in checkpoints
LM, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"  # suffixes of architecture names


def is_scalar(hf: HFConfig) -> bool:
    """Whether the model has a scalar head (one number per token) instead of the vocabulary."""
    return any(str(name).endswith(CLASSIFIER) for name in hf.get("architectures") or ())


class Split(StrEnum):
    """How a Megatron parameter is sharded over the tensor-parallel ranks (expert-tensor-parallel for experts)."""

    REPLICATED = "replicated"  # every rank holds the complete parameter
    COLUMN = "column"  # rows of the matrix (outputs) are sharded: concatenate on axis 0
    ROW = "row"  # columns of the matrix (inputs) are sharded: concatenate on axis 1
    GATE_UP = "gate_up"  # gate above up, each sharded like COLUMN: a rank holds [gate shard; up shard]
    QKV = "qkv"  # COLUMN over [query heads, key, value] of key/value head 0, then of head 1, ...
    VOCAB = "vocab"  # COLUMN; the last rank may hold padding rows after the vocabulary


class Where(StrEnum):
    """The layers that have the tensor."""

    TOP = "top"  # outside the layers
    EVERY = "every"
    DENSE = "dense"
    MOE = "moe"
    MTP = "mtp"  # draft layers; a draft layer has no tensor of the other kinds


class Precision(StrEnum):
    """The stored dtype."""

    WEIGHT = "weight"  # the checkpoint's dtype: BF16 or FP32
    FP32 = "fp32"  # FP32 for any dtype of the checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of a family's table."""

    hf: tuple[str, ...]  # name patterns; several (gate, up; q, k, v) share the rows of one Megatron parameter
    megatron: str  # name pattern of the parameter in GPTModel built from the local spec
    shapes: tuple[tuple[str, ...], ...]  # of each Hugging Face tensor, as names of the family's `dims`
    split: Split = Split.REPLICATED
    where: Where = Where.EVERY
    precision: Precision = Precision.WEIGHT
    given: str | None = None  # the entry exists only if this dimension is not 0 ...
    unless: str | None = None  # ... and this one is 0
    linear: bool = False  # a Megatron parallel linear, which has an `_extra_state` object in checkpoints
    stored: str | None = None  # name pattern in checkpoints if it differs from the parameter's
    copies: tuple[str, ...] = ()  # names under which each draft layer of a Hugging Face checkpoint repeats the tensor
    # Entries of one layer with the same key form one parameter of a serving engine that fuses them only within one load
    # request: publication sends them, with their scales and biases, in the same request.
    fused: str | None = None

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.megatron


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of one Hugging Face tensor in Megatron."""

    hf_name: str
    shape: tuple[int, ...]  # of the Hugging Face tensor
    entry: Entry
    layer: int | None
    expert: int | None
    index: int  # index in entry.hf
    depth: int | None  # of a draft layer, from 0

    @property
    def megatron_name(self) -> str:
        """Parameter name with the global layer and expert numbers."""
        return self.entry.megatron.format(i=self.layer, e=self.expert, j=self.depth)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family. Its functions take a parsed config.json.

    transformer_config: keyword arguments for Megatron's TransformerConfig that follow from the architecture (the caller
    adds layout, precision and fusions); raises ValueError for an option that the family cannot train.
    dims: the dimensions that `table` names, 0 where the model lacks a module (`settings` has those of common modules).
    moe_layers: global numbers of the layers with routed experts. skipped: patterns of known checkpoint tensors that are
    not trained. rotary_base, rotary_percent: the base of GPTModel's rotary embedding, and the share of a head's
    channels that it rotates (MLA takes its base from transformer_config).
    """

    name: str
    architectures: frozenset[str]
    model_types: frozenset[str]
    table: tuple[Entry, ...]
    dims: Callable[[HFConfig], Mapping[str, int]]
    transformer_config: Callable[[HFConfig], TransformerKeywords]
    rotary_base: Callable[[HFConfig], float]
    rotary_percent: Callable[[HFConfig], float] = lambda hf: 1.0
    moe_layers: Callable[[HFConfig], tuple[int, ...]] = lambda hf: ()
    skipped: tuple[str, ...] = ()

    def bind(self, hf: HFConfig, *, mtp: bool = False) -> TensorMap:
        """The table of one model, with its draft layers if `mtp`. Raises ValueError for an option that the family
        cannot train."""
        try:
            self.transformer_config(hf)
        except (TypeError, AttributeError, ArithmeticError) as e:
            raise ValueError(f"config.json is not valid for family {self.name}: {e}") from None
        return TensorMap(self, hf, mtp)

    def vocab_size(self, hf: HFConfig) -> int:
        return self.dims(hf)["vocab"]

    def num_layers(self, hf: HFConfig) -> int:
        return self.dims(hf)["layers"]

    def num_experts(self, hf: HFConfig) -> int:
        """Experts of an MoE layer; 0 for a dense model."""
        return self.dims(hf).get("experts", 0)

    def top_k(self, hf: HFConfig) -> int:
        """Experts per token; 0 for a dense model."""
        return self.dims(hf).get("top_k", 0)

    def mtp_layers(self, hf: HFConfig) -> int:
        """Draft layers of the checkpoint, one per depth of multi-token prediction."""
        return self.dims(hf).get("mtp", 0)

    def parameter_count(self, hf: HFConfig, *, mtp: bool = False) -> int:
        """Number of elements of all Hugging Face tensors, including routing biases, excluding copies."""
        tensors = TensorMap(self, hf, mtp)
        return sum(
            len(tensors.layers_of(entry)) * tensors.experts_of(entry) * math.prod(tensors.megatron_shape(entry))
            for entry in tensors.entries
        )


@dataclass(frozen=True)
class TensorMap:
    """A family's table applied to one model config, readable in both directions."""

    family: Family
    hf: HFConfig
    mtp: bool = False  # include the draft layers

    @cached_property
    def dims(self) -> Mapping[str, int]:
        return self.family.dims(self.hf)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The entries that this model has."""
        return tuple(
            entry
            for entry in self.family.table
            if (entry.given is None or self.dims[entry.given]) and not (entry.unless and self.dims[entry.unless])
            if entry.where is not Where.MTP or self.draft_layers
        )

    @cached_property
    def moe_layers(self) -> frozenset[int]:
        return frozenset(self.family.moe_layers(self.hf))

    @cached_property
    def draft_layers(self) -> range:
        """Global numbers of the draft layers."""
        layers: int = self.dims["layers"]
        return range(layers, layers + self.family.mtp_layers(self.hf) * self.mtp)

    @cached_property
    def biased(self) -> frozenset[str]:
        """Names within their layer of the linears that have a bias: "self_attention.linear_proj"."""
        leaves = (entry.megatron.removesuffix(".bias").split(".") for entry in self.entries if _is_bias(entry))
        return frozenset(".".join(path[-2:]) for path in leaves)

    @cached_property
    def tied(self) -> bool:
        """Whether the embedding is the output head too."""
        return bool(self.dims.get("tied", 0))

    @cached_property
    def weight_dtype(self) -> torch.dtype:
        """The checkpoint's dtype for Precision.WEIGHT, from config.json; bfloat16 by default."""
        name = str(self.hf.get("dtype") or self.hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        known = {"bfloat16": torch.bfloat16, "float32": torch.float32}
        if name not in known:
            raise ValueError(f"config.json: dtype {name!r} is not supported: expected one of {sorted(known)}")
        return known[name]

    def dtype(self, entry: Entry) -> torch.dtype:
        """The checkpoint's dtype of an entry's tensors."""
        return torch.float32 if entry.precision is Precision.FP32 else self.weight_dtype

    @cached_property
    def _shapes(self) -> dict[tuple[tuple[str, ...], ...], tuple[tuple[int, ...], ...]]:
        return {}

    def shapes(self, entry: Entry) -> tuple[tuple[int, ...], ...]:
        """Shapes of the entry's Hugging Face tensors."""
        known = self._shapes
        if entry.shapes not in known:
            known[entry.shapes] = tuple(tuple(self.dims[name] for name in shape) for shape in entry.shapes)
        return known[entry.shapes]

    def megatron_shape(self, entry: Entry) -> tuple[int, ...]:
        """Shape of the unsharded Megatron parameter: the rows of all its Hugging Face tensors."""
        shapes = self.shapes(entry)
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def runs(self, entry: Entry, index: int) -> Iterator[tuple[int, int, int]]:
        """(first row in Hugging Face tensor `index`, first row in the unsharded Megatron parameter, rows) of each run
        of rows that is contiguous in both."""
        groups = self.dims["kv_heads"] if entry.split is Split.QKV else 1
        rows = [shape[0] // groups for shape in self.shapes(entry)]
        for g in range(groups):
            yield g * rows[index], g * sum(rows) + sum(rows[:index]), rows[index]

    def layers_of(self, entry: Entry) -> tuple[int | None, ...]:
        """Global numbers of the layers that have the entry; (None,) for a tensor outside the layers."""
        if entry.where is Where.TOP:
            return (None,)
        return tuple(i for i in range(self.dims["layers"] + len(self.draft_layers)) if self._has(entry, i))

    def depth(self, layer: int | None) -> int | None:
        """Number of a draft layer, from 0; None for any other layer."""
        return None if layer is None or layer < self.dims["layers"] else layer - self.dims["layers"]

    def copies_of(self, entry: Entry) -> tuple[str, ...]:
        """Hugging Face names of the copies of the entry's tensor."""
        return tuple(pattern.format(i=i) for i in self.draft_layers for pattern in entry.copies)

    def experts_of(self, entry: Entry) -> int:
        return self.dims["experts"] if entry.per_expert else 1

    def places(self) -> Iterator[Place]:
        """Every Hugging Face tensor of the model, once."""
        for entry in self.entries:
            for layer in self.layers_of(entry):
                for e in range(self.experts_of(entry)):
                    expert = e if entry.per_expert else None
                    yield from (self._place(entry, layer, expert, index) for index in range(len(entry.hf)))

    def fused(self) -> tuple[tuple[str, ...], ...]:
        """Hugging Face names of the tensors of each `Entry.fused` key and layer with more than one tensor."""
        groups: dict[tuple[str, int | None, int | None], list[str]] = {}
        for entry in self.entries:
            if entry.fused is not None:
                for layer in self.layers_of(entry):
                    for e in range(self.experts_of(entry)):
                        expert = e if entry.per_expert else None
                        names = (self._place(entry, layer, expert, index).hf_name for index in range(len(entry.hf)))
                        groups.setdefault((entry.fused, layer, expert), []).extend(names)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)

    def kinds(self, *, each_expert: bool = False) -> Iterator[tuple[Place, int]]:
        """One tensor of each set of tensors that differ only in their expert number, and the size of the set. With
        each_expert every tensor, as `places`."""
        if each_expert:
            yield from ((place, 1) for place in self.places())
            return
        for entry in self.entries:
            first, n = (0 if entry.per_expert else None), self.experts_of(entry)
            for layer in self.layers_of(entry) if n else ():
                yield from ((self._place(entry, layer, first, index), n) for index in range(len(entry.hf)))

    def is_skipped(self, hf_name: str) -> bool:
        """Whether a name is a known checkpoint tensor that is not trained, or that repeats another one."""
        return hf_name in self._beside or any(pattern.fullmatch(hf_name) for pattern in self._skipped)

    def place_of(self, hf_name: str) -> Place:
        """Hugging Face name -> place in Megatron. Raises ValueError for a name that the model does not have."""
        for entry, index, pattern in self._hf_patterns:
            if match := pattern.fullmatch(hf_name):
                layer, expert = self._numbers(match)
                if self._exists(entry, layer, expert):
                    return self._place(entry, layer, expert, index)
        raise ValueError(
            f"tensor {hf_name!r} does not belong to family {self.family.name} with this config.json: check its "
            "numbers of layers, heads and experts against the checkpoint"
        )

    def is_copy(self, megatron_name: str) -> bool:
        """Whether a parameter is a copy of another: the last stage's copy of a tied embedding, named like the head."""
        return self.tied and megatron_name == "output_layer.weight"

    def places_in(self, megatron_name: str) -> tuple[Place, ...]:
        """Megatron parameter name (global numbers) -> the Hugging Face tensors in it, in the order of the entry.

        Raises ValueError for a name that the model does not have.
        """
        for entry, pattern in self._megatron_patterns:
            if match := pattern.fullmatch(megatron_name):
                layer, expert = self._numbers(match)
                if self._exists(entry, layer, expert):
                    return tuple(self._place(entry, layer, expert, index) for index in range(len(entry.hf)))
        raise ValueError(f"parameter {megatron_name!r} is not in family {self.family.name}'s table for this config")

    def _place(self, entry: Entry, layer: int | None, expert: int | None, index: int) -> Place:
        name = entry.hf[index].format(i=layer, e=expert)
        shape, depth = self.shapes(entry)[index], self.depth(layer)
        return Place(hf_name=name, shape=shape, entry=entry, layer=layer, expert=expert, index=index, depth=depth)

    def _has(self, entry: Entry, layer: int) -> bool:
        if layer >= self.dims["layers"]:
            return entry.where is Where.MTP and layer in self.draft_layers
        if entry.where is Where.EVERY:
            return True
        return entry.where is (Where.MOE if layer in self.moe_layers else Where.DENSE)

    def _exists(self, entry: Entry, layer: int | None, expert: int | None) -> bool:
        return (layer is None or self._has(entry, layer)) and (expert is None or expert < self.dims["experts"])

    @cached_property
    def _hf_patterns(self) -> tuple[tuple[Entry, int, re.Pattern[str]], ...]:
        return tuple((entry, index, _regex(p)) for entry in self.entries for index, p in enumerate(entry.hf))

    @cached_property
    def _megatron_patterns(self) -> tuple[tuple[Entry, re.Pattern[str]], ...]:
        return tuple((entry, _regex(entry.megatron)) for entry in self.entries)

    @cached_property
    def _skipped(self) -> tuple[re.Pattern[str], ...]:
        # some releases with tied embeddings also store the head; it must equal the embedding
        head = (r"lm_head\.weight",) if self.tied else ()
        return tuple(re.compile(pattern) for pattern in (*self.family.skipped, *head))

    @cached_property
    def _beside(self) -> frozenset[str]:
        """Names of draft-layer tensors that are not in `places`: the copies, and without `mtp` all of them."""
        whole = TensorMap(self.family, self.hf, mtp=True)
        # of the unfiltered table: a tied head may be stored too
        names = {name for entry in self.family.table for name in whole.copies_of(entry)}
        if not self.mtp:
            names |= {place.hf_name for place in whole.places() if place.depth is not None}
        return frozenset(names)

    def _numbers(self, match: re.Match[str]) -> tuple[int | None, int | None]:
        """(global layer, expert)."""
        found = {letter: int(number) for letter, number in match.groupdict().items()}
        if "j" in found:
            found["i"] = self.dims["layers"] + found["j"]
        return found.get("i"), found.get("e")


def _is_bias(entry: Entry) -> bool:
    return entry.megatron.endswith(".bias")


def _regex(pattern: str) -> re.Pattern[str]:
    number = r"(?P<{}>0|[1-9]\d*)"
    escaped = re.escape(pattern)
    for letter in "ije":
        escaped = escaped.replace(re.escape("{" + letter + "}"), number.format(letter))
    return re.compile(escaped)

"""A family of models is data: how its Hugging Face config reads as a Megatron config, and one table of its tensors.

The table is read in both directions: every Hugging Face tensor of a model and its place in Megatron (checkpoint
conversion), and every Megatron parameter and the Hugging Face tensors in it (publishing weights). Patterns hold `{i}`
for the global layer number, from 0, and `{e}` for the global expert number. Draft layers (multi-token prediction) are
numbered on after the last one; `{j}` counts them alone, from 0.
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

HFConfig = Mapping[str, Any]  # a parsed config.json
SCORE = "score.weight"  # a scalar head, as transformers and a checkpoint call it
LM, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"  # how architectures end


def is_scalar(hf: HFConfig) -> bool:
    """Whether the model ends in a scalar head (one number a token) instead of the vocabulary."""
    return any(str(name).endswith(CLASSIFIER) for name in hf.get("architectures") or ())


class Split(StrEnum):
    """How a Megatron parameter is spread over the tensor-parallel ranks (expert-tensor-parallel for experts)."""

    REPLICATED = "replicated"  # every rank holds it whole
    COLUMN = "column"  # rows of the matrix (outputs) are divided: concatenate on axis 0
    ROW = "row"  # columns of the matrix (inputs) are divided: concatenate on axis 1
    GATE_UP = "gate_up"  # gate over up, each divided like COLUMN: a rank holds [gate part; up part]
    QKV = "qkv"  # COLUMN over [query heads, key, value] of key/value head 0, then of head 1, ...
    VOCAB = "vocab"  # COLUMN, whose last rank may hold padding rows after the vocabulary


class Where(StrEnum):
    """Which layers have the tensor."""

    TOP = "top"  # outside the layers
    EVERY = "every"
    DENSE = "dense"
    MOE = "moe"
    MTP = "mtp"  # draft layers; a draft layer has no tensor of the other kinds


class Precision(StrEnum):
    """The stored dtype."""

    WEIGHT = "weight"  # the checkpoint's: BF16 or FP32
    FP32 = "fp32"  # FP32 whatever the weights are


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a family's table."""

    hf: tuple[str, ...]  # name patterns; several (gate, up; q, k, v) share the rows of one Megatron parameter
    megatron: str  # name pattern of the parameter in GPTModel built from the local spec
    shapes: tuple[tuple[str, ...], ...]  # of each Hugging Face tensor, as names of the family's `dims`
    split: Split = Split.REPLICATED
    where: Where = Where.EVERY
    precision: Precision = Precision.WEIGHT
    given: str | None = None  # the entry exists only where this dimension is not 0 ...
    unless: str | None = None  # ... and this one is
    linear: bool = False  # a Megatron parallel linear, which keeps an `_extra_state` object in checkpoints
    stored: str | None = None  # name pattern in checkpoints, where megatron renames the parameter on its way there
    copies: tuple[str, ...] = ()  # names under which each draft layer of a Hugging Face checkpoint holds it again
    # Entries of one layer with the same key become one parameter of a serving engine that joins them only within one
    # load request: publication never sends them, or their scales and biases, in different requests.
    fused: str | None = None

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.megatron


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one Hugging Face tensor lives in Megatron."""

    hf_name: str
    shape: tuple[int, ...]  # of the Hugging Face tensor
    entry: Entry
    layer: int | None
    expert: int | None
    part: int  # index in entry.hf
    depth: int | None  # of a draft layer, from 0

    @property
    def megatron_name(self) -> str:
        """Parameter name with the global layer and expert numbers."""
        return self.entry.megatron.format(i=self.layer, e=self.expert, j=self.depth)


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the bridge knows of a family of models. Its functions take a parsed config.json.

    transformer_config: keyword arguments for Megatron's TransformerConfig that the architecture alone decides (layout,
    precision and fusions are the caller's); raises ValueError for an option that the family cannot train.
    dims: the dimensions that `table` names, 0 for a part that the model lacks (`settings` has those of common parts).
    moe_layers: global numbers of the layers with routed experts. skipped: patterns of checkpoint tensors that are known
    and not trained. rotary_base, rotary_percent: of GPTModel's own rotary embedding, and the share of a head's channels
    that it turns (MLA takes its base from transformer_config).
    """

    name: str
    architectures: frozenset[str]
    model_types: frozenset[str]
    table: tuple[Entry, ...]
    dims: Callable[[HFConfig], Mapping[str, int]]
    transformer_config: Callable[[HFConfig], dict[str, Any]]
    rotary_base: Callable[[HFConfig], float]
    rotary_percent: Callable[[HFConfig], float] = lambda hf: 1.0
    moe_layers: Callable[[HFConfig], tuple[int, ...]] = lambda hf: ()
    skipped: tuple[str, ...] = ()

    def bind(self, hf: HFConfig, *, mtp: bool = False) -> TensorMap:
        """The table for one model, with its draft layers if `mtp`. Raises ValueError for an option that the family
        cannot train."""
        try:
            self.transformer_config(hf)
        except (TypeError, AttributeError, ArithmeticError) as e:
            raise ValueError(f"config.json cannot be read as one of family {self.name}: {e}") from None
        return TensorMap(self, hf, mtp)

    def vocab_size(self, hf: HFConfig) -> int:
        return self.dims(hf)["vocab"]

    def num_layers(self, hf: HFConfig) -> int:
        return self.dims(hf)["layers"]

    def num_experts(self, hf: HFConfig) -> int:
        """Of a layer with experts; 0 for a dense model."""
        return self.dims(hf).get("experts", 0)

    def top_k(self, hf: HFConfig) -> int:
        """Experts a token; 0 for a dense model."""
        return self.dims(hf).get("top_k", 0)

    def mtp_layers(self, hf: HFConfig) -> int:
        """Draft layers of the checkpoint, one for each depth of multi-token prediction."""
        return self.dims(hf).get("mtp", 0)

    def parameter_count(self, hf: HFConfig, *, mtp: bool = False) -> int:
        """Elements of all Hugging Face tensors, routing biases included, copies not; no walk over single experts."""
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
    mtp: bool = False  # with the draft layers

    @cached_property
    def dims(self) -> Mapping[str, int]:
        return self.family.dims(self.hf)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The lines that this model has."""
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
        """Names of the linears that have a bias, within their layer: "self_attention.linear_proj"."""
        leaves = (entry.megatron.removesuffix(".bias").split(".") for entry in self.entries if _is_bias(entry))
        return frozenset(".".join(path[-2:]) for path in leaves)

    @cached_property
    def tied(self) -> bool:
        """Whether the embedding is the output head too."""
        return bool(self.dims.get("tied", 0))

    @property
    def weight_dtype(self) -> torch.dtype:
        """The checkpoint's dtype for Precision.WEIGHT, from config.json; bfloat16 where it does not say."""
        name = str(self.hf.get("dtype") or self.hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        known = {"bfloat16": torch.bfloat16, "float32": torch.float32}
        if name not in known:
            raise ValueError(f"config.json: dtype {name!r} is not trained: want one of {sorted(known)}")
        return known[name]

    def dtype(self, entry: Entry) -> torch.dtype:
        """The checkpoint's dtype of an entry's tensors."""
        return torch.float32 if entry.precision is Precision.FP32 else self.weight_dtype

    def shapes(self, entry: Entry) -> tuple[tuple[int, ...], ...]:
        """Of each Hugging Face tensor of the entry."""
        return tuple(tuple(self.dims[name] for name in shape) for shape in entry.shapes)

    def megatron_shape(self, entry: Entry) -> tuple[int, ...]:
        """Of the whole Megatron parameter: the rows of all its Hugging Face tensors."""
        shapes = self.shapes(entry)
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def runs(self, entry: Entry, part: int) -> Iterator[tuple[int, int, int]]:
        """(first row in Hugging Face tensor `part`, first row in the whole Megatron parameter, rows) of each run of
        rows that lie together in both."""
        groups = self.dims["kv_heads"] if entry.split is Split.QKV else 1
        rows = [shape[0] // groups for shape in self.shapes(entry)]
        for g in range(groups):
            yield g * rows[part], g * sum(rows) + sum(rows[:part]), rows[part]

    def layers_of(self, entry: Entry) -> tuple[int | None, ...]:
        """Global layer numbers that have the entry; (None,) for a tensor outside the layers."""
        if entry.where is Where.TOP:
            return (None,)
        return tuple(i for i in range(self.dims["layers"] + len(self.draft_layers)) if self._has(entry, i))

    def depth(self, layer: int | None) -> int | None:
        """Of a draft layer, from 0; None for any other layer."""
        return None if layer is None or layer < self.dims["layers"] else layer - self.dims["layers"]

    def copies_of(self, entry: Entry) -> tuple[str, ...]:
        """Hugging Face names under which the entry's tensor is stored again."""
        return tuple(pattern.format(i=i) for i in self.draft_layers for pattern in entry.copies)

    def experts_of(self, entry: Entry) -> int:
        return self.dims["experts"] if entry.per_expert else 1

    def places(self) -> Iterator[Place]:
        """Every Hugging Face tensor of the model, once."""
        for entry in self.entries:
            for layer in self.layers_of(entry):
                for e in range(self.experts_of(entry)):
                    expert = e if entry.per_expert else None
                    yield from (self._place(entry, layer, expert, part) for part in range(len(entry.hf)))

    def fused(self) -> tuple[tuple[str, ...], ...]:
        """Hugging Face names of the tensors of each `Entry.fused` key and layer, where there are several."""
        groups: dict[tuple[str, int | None, int | None], list[str]] = {}
        for entry in self.entries:
            if entry.fused is not None:
                for layer in self.layers_of(entry):
                    for e in range(self.experts_of(entry)):
                        expert = e if entry.per_expert else None
                        names = (self._place(entry, layer, expert, part).hf_name for part in range(len(entry.hf)))
                        groups.setdefault((entry.fused, layer, expert), []).extend(names)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)

    def kinds(self, *, each_expert: bool = False) -> Iterator[tuple[Place, int]]:
        """A tensor for each of those that differ only in the number of their expert, and how many they are. With
        each_expert every tensor, as `places`."""
        if each_expert:
            yield from ((place, 1) for place in self.places())
            return
        for entry in self.entries:
            first, n = (0 if entry.per_expert else None), self.experts_of(entry)
            for layer in self.layers_of(entry) if n else ():
                yield from ((self._place(entry, layer, first, part), n) for part in range(len(entry.hf)))

    def is_skipped(self, hf_name: str) -> bool:
        """A known checkpoint tensor that is not trained, or repeats one that is."""
        return hf_name in self._beside or any(pattern.fullmatch(hf_name) for pattern in self._skipped)

    def place_of(self, hf_name: str) -> Place:
        """Hugging Face name -> place in Megatron. Raises ValueError for a name that the model does not have."""
        for entry, part, pattern in self._hf_patterns:
            if match := pattern.fullmatch(hf_name):
                layer, expert = self._numbers(match)
                if self._exists(entry, layer, expert):
                    return self._place(entry, layer, expert, part)
        raise ValueError(
            f"tensor {hf_name!r} is not one of family {self.family.name}'s with this config.json: "
            "check the numbers of layers, heads and experts in it against the checkpoint"
        )

    def is_copy(self, megatron_name: str) -> bool:
        """A parameter that only repeats another one: of tied embeddings, the last stage's, under the head's name."""
        return self.tied and megatron_name == "output_layer.weight"

    def parts_of(self, megatron_name: str) -> tuple[Place, ...]:
        """Megatron parameter name (global numbers) -> the Hugging Face tensors in it, in the order of the entry.

        Raises ValueError for a name that the model does not have.
        """
        for entry, pattern in self._megatron_patterns:
            if match := pattern.fullmatch(megatron_name):
                layer, expert = self._numbers(match)
                if self._exists(entry, layer, expert):
                    return tuple(self._place(entry, layer, expert, part) for part in range(len(entry.hf)))
        raise ValueError(f"parameter {megatron_name!r} is not in family {self.family.name}'s table for this config")

    def _place(self, entry: Entry, layer: int | None, expert: int | None, part: int) -> Place:
        name = entry.hf[part].format(i=layer, e=expert)
        shape, depth = self.shapes(entry)[part], self.depth(layer)
        return Place(hf_name=name, shape=shape, entry=entry, layer=layer, expert=expert, part=part, depth=depth)

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
        return tuple((entry, part, _regex(p)) for entry in self.entries for part, p in enumerate(entry.hf))

    @cached_property
    def _megatron_patterns(self) -> tuple[tuple[Entry, re.Pattern[str]], ...]:
        return tuple((entry, _regex(entry.megatron)) for entry in self.entries)

    @cached_property
    def _skipped(self) -> tuple[re.Pattern[str], ...]:
        # with tied embeddings some releases store the head nevertheless; it must be the embedding
        head = (r"lm_head\.weight",) if self.tied else ()
        return tuple(re.compile(pattern) for pattern in (*self.family.skipped, *head))

    @cached_property
    def _beside(self) -> frozenset[str]:
        """Names of draft layers that are not among `places`: the copies, and all of them without `mtp`."""
        whole = TensorMap(self.family, self.hf, mtp=True)
        # of the whole table: a head that is tied may be stored all the same
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

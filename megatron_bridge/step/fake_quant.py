"""Quantization-aware training on Megatron's modules: forward computes with the weights that the rollout serves.

A rank keeps the decoded codes of every covered weight and recomputes them only when weights have changed: once a step,
not once per micro-batch or recomputed layer. A linear computes with them, and its gradient goes to the weight unchanged
(straight-through). Blocks are those of Hugging Face's tensors: Megatron's fused matrices are split into these, and no
block is split over ranks (`precision.check_precision`). The unrounded weight is published; the publisher encodes it
with the same codec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_bridge.config import PrecisionConfig
from megatron_bridge.device.collective_errors import raise_on_every_rank
from megatron_bridge.device.parallel import ParallelContext
from megatron_bridge.families.base import Entry, Split, TensorMap
from megatron_bridge.model.build import PolicyModel, unwrap
from megatron_bridge.model.weight_functions import published_weight_of, use_input_function, use_weight_function
from megatron_bridge.optim.param_names import renamer
from megatron_bridge.step.overlap import finish_param_gather
from quant.formats.codec import Codec
from quant.qat import activation_codec, fake_activations, straight_through
from quant.registry import make_codec
from quant.spec import QuantSpec

_BATCH_ELEMENTS = 1 << 26  # weights that are rounded in one call

Run = tuple[int, int]  # first row, end


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """This rank's rows of one covered Hugging Face tensor."""

    name: str
    runs: tuple[Run, ...]  # of the parameter's rows


@dataclass(frozen=True, slots=True, eq=False)
class _Weight:
    """A parameter that holds covered tensors."""

    linear: Any
    name: str  # the parameter's name in the linear
    value: Tensor  # the weight that the linear computes with, in the parameter's dtype
    pieces: tuple[_Piece, ...]
    whole: bool  # every row belongs to a piece
    group: ProcessGroup | None  # ranks over which the tensors are sharded


class FakeQuant:
    """The covered linears of one rank. Construction and `refresh` are collective."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        parallel: ParallelContext,
        tensors: TensorMap,
        spec: QuantSpec,
        precision: PrecisionConfig,
        device: torch.device,
    ) -> None:
        self._chunks, self._device = chunks, device
        self._codec, self._rounds = make_codec(spec), precision.qat
        inputs = activation_codec(spec) if precision.activations == "fp8" else None
        self._weights: list[_Weight] = []
        for linear, name, covered, group in _covered(chunks, parallel, tensors, spec):
            if inputs is not None:
                use_input_function(linear, partial(self._input, inputs))
            if precision.qat:
                self._weights.append(weight := _weight(linear, name, covered, group))
                use_weight_function(linear, partial(_replaced, weight.value), published=False, name=name)
        self._stale, self._rounding = True, True

    def _input(self, codec: Codec, x: Tensor) -> Tensor:
        return fake_activations(codec, x) if self._rounding else x

    def values(self) -> list[Tensor]:
        """The rounded weights that the linears compute with."""
        return [weight.value for weight in self._weights]

    def weights_changed(self) -> None:
        """Mark the rounded weights as stale. Call it after the parameters have changed."""
        self._stale = True

    def refresh(self, *, rounding: bool = True) -> None:
        """Round the current weights for the linears to compute with; a no-op if they have not changed. Without
        `rounding` the linears compute with the unrounded weights: for passes under other models' weights, which were
        not trained with rounding. After a call with another value of `rounding`, weights must be marked as changed.

        Raises ValueError, on every rank, naming a weight that is not finite.
        """
        self._rounding = rounding
        if not (self._stale and self._rounds):
            return
        # megatron keeps views that it creates here, and later writes into them with gradients on
        with torch.enable_grad():
            finish_param_gather(self._chunks)
        error = None
        try:
            with torch.no_grad():
                if not rounding:
                    for weight in self._weights:
                        weight.value.copy_(published_weight_of(weight.linear, weight.name))
                else:
                    amax = _shared_amax(self._weights, self._codec) if self._codec.shared_amax else None
                    for batch in _batches(self._weights):
                        _round(batch, self._codec, amax)
        except ValueError as e:
            error = e
        raise_on_every_rank(error, self._device)
        self._stale = False


def _covered(
    chunks: Sequence[DistributedDataParallel], parallel: ParallelContext, tensors: TensorMap, spec: QuantSpec
) -> Iterator[tuple[Any, str, tuple[_Piece, ...], ProcessGroup | None]]:
    """(linear, parameter name, covered tensors in it, group of ranks over which it is sharded), in the same order on
    these ranks."""
    for model in map(unwrap, chunks):
        rename = renamer(model, parallel)
        for name, module, leaf, weight in _matrices(model):
            places = tensors.places_in(rename(f"{name}.{leaf}"))
            if not any(spec.covers(place.hf_name, place.shape) for place in places):
                continue
            entry = places[0].entry
            pieces = tuple(
                _Piece(place.hf_name, _runs(tensors, place.index, entry, len(weight)))
                for place in places
                if spec.covers(place.hf_name, place.shape)
            )
            group = parallel.etp_group if entry.per_expert else parallel.tp_group
            yield module, leaf, pieces, None if entry.split is Split.REPLICATED else group


def _matrices(model: PolicyModel) -> Iterator[tuple[str, Any, str, Tensor]]:
    """(module's name, module, parameter's name in it, parameter) of every linear's weight except the head."""
    for name, module in model.named_modules():
        if module is getattr(model, "output_layer", None):
            continue
        for leaf, parameter in module._parameters.items():
            # TransformerEngine's grouped linear has weight0, weight1, ... for a rank's experts
            if parameter is not None and leaf.rstrip("0123456789") == "weight":
                yield name, module, leaf, parameter


def _runs(tensors: TensorMap, index: int, entry: Entry, rows: int) -> tuple[Run, ...]:
    """Rows of Hugging Face tensor `index` among the `rows` of a rank's shard of the parameter."""
    if entry.split is Split.QKV:  # whole groups of heads, each [query, key, value]
        return tuple((first, first + n) for _, first, n in tensors.runs(entry, index) if first < rows)
    share = rows // len(entry.hf)
    return ((index * share, (index + 1) * share),)


def _weight(linear: Any, name: str, pieces: tuple[_Piece, ...], group: ProcessGroup | None) -> _Weight:
    covered = sum(end - first for piece in pieces for first, end in piece.runs)
    value = torch.empty_like(getattr(linear, name), requires_grad=False)
    return _Weight(linear, name, value, pieces, covered == len(value), group)


def _replaced(value: Tensor, weight: Tensor) -> Tensor:
    return straight_through(weight, value)


def _rows(x: Tensor, runs: Sequence[Run]) -> Tensor:
    """The rows of `runs`; a view if there is one run."""
    slices = [x[first:end] for first, end in runs]
    return slices[0] if len(slices) == 1 else torch.cat(slices)


def _batches(weights: Sequence[_Weight]) -> Iterator[list[_Weight]]:
    """Batches of bounded size with weights of one shape together, since these share one call."""
    batch: list[_Weight] = []
    for weight in sorted(weights, key=lambda w: tuple(w.value.shape)):
        if batch and sum(w.value.numel() for w in batch) + weight.value.numel() > _BATCH_ELEMENTS:
            yield batch
            batch = []
        batch.append(weight)
    if batch:
        yield batch


def _round(weights: Sequence[_Weight], codec: Codec, amax: Mapping[str, Tensor] | None) -> None:
    bundle: dict[str, Tensor] = {}
    into: dict[str, Tensor] = {}
    for weight in weights:
        source = published_weight_of(weight.linear, weight.name)
        if not weight.whole:
            weight.value.copy_(source)
        for piece in weight.pieces:
            bundle[piece.name] = _rows(source, piece.runs)
            if len(piece.runs) == 1:
                into[piece.name] = _rows(weight.value, piece.runs)
    tops = None if amax is None else {name: amax[name] for name in bundle}
    rounded = codec.fake(bundle, tops, into)
    for weight in weights:
        for piece in weight.pieces:
            if len(piece.runs) > 1:
                lengths = [end - first for first, end in piece.runs]
                for (first, end), rows in zip(piece.runs, rounded[piece.name].split(lengths), strict=True):
                    weight.value[first:end] = rows


def _shared_amax(weights: Sequence[_Weight], codec: Codec) -> dict[str, Tensor]:
    """Tensor name -> the largest magnitude of its whole bundle over the ranks that hold it: one collective for all
    experts, one for the other weights."""
    tops: dict[str, Tensor] = {}
    for group in dict.fromkeys(weight.group for weight in weights):
        own: dict[str, Tensor] = {}
        for weight in weights:
            if weight.group is group:
                source = published_weight_of(weight.linear, weight.name)
                own |= {piece.name: codec.amax(_rows(source, piece.runs)) for piece in weight.pieces}
        names = list(own)
        both = torch.stack([torch.stack([own[n] for n in codec.bundle_of(name)]).amax() for name in names])
        both = both.nan_to_num(nan=torch.inf, posinf=torch.inf)  # backends differ in the maximum of NaN
        if group is not None and group.size() > 1:
            dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        tops |= zip(names, both.unbind(), strict=True)
    return tops

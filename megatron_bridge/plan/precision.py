"""The quantization that training and rollout use, and checks that this run can apply it, from config.json alone and
before any process starts. Imports no megatron.

A rank quantizes its shard of a weight by itself. That equals the quantization of the whole weight as long as no block
of elements that share a scale lies on two ranks; a layout that splits a block is an error.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_bridge.config import PrecisionConfig, TrainerConfig
from megatron_bridge.families.base import Entry, HFConfig, Place, Split, TensorMap
from megatron_bridge.families.registry import family_of
from quant.formats.codec import Codec
from quant.hf_config import spec_from_hf
from quant.qat import activation_codec
from quant.registry import make_codec
from quant.spec import QuantSpec


def served_spec(precision: PrecisionConfig, hf: HFConfig) -> QuantSpec | None:
    """The quantization of the rollout's weights for a model with this config.json; None: BF16.

    A checkpoint in the run's format is served unchanged, with its blocks and quantized modules; any other is
    requantized. Raises ValueError for blocks or a scope in the configuration that differ from such a checkpoint's.
    """
    asked, stored = precision.spec(), spec_from_hf(hf)
    if asked is None or stored is None or stored.format is not asked.format:
        return asked
    if precision.convention is not None and stored.convention != asked.convention:
        return asked
    if precision.block is not None and stored.block != asked.block:
        raise ValueError(
            f"precision.block = {list(asked.block)}, but config.json's quantization_config has blocks of "
            f"{list(stored.block)}: training and rollout must use the same blocks; remove precision.block, or "
            "start from the BF16 checkpoint, which is then quantized with precision.block"
        )
    if precision.scope is not None:
        for place in family_of(hf).bind(hf).places():
            name, shape = place.hf_name, place.shape
            if asked.covers(name, shape) != (quantized := stored.covers(name, shape)):
                raise ValueError(
                    f"precision.scope = {precision.scope!r}, but config.json's quantization_config "
                    f"{'quantizes' if quantized else 'does not quantize'} {name}: remove precision.scope, or start "
                    "from the BF16 checkpoint"
                )
    return stored


def trained_spec(config: TrainerConfig, hf: HFConfig) -> QuantSpec | None:
    """`served_spec`, or None when the trainer rounds neither weights nor activations.

    Raises ValueError as `served_spec`, and when config.json, which is the served checkpoint's, has another format.
    """
    precision = config.precision
    if not precision.qat and precision.activations == "none":
        return None
    asked, stored = precision.spec(), spec_from_hf(hf)
    assert asked is not None, "format bf16 supports neither qat nor activations"
    if stored is not None and stored.format is not asked.format:
        raise ValueError(
            f"precision.format = {asked.format.value!r}, but config.json's quantization_config stores "
            f"{stored.format.value!r}: set precision.format = {stored.format.value!r}, or requantize the checkpoint"
        )
    return served_spec(precision, hf)


def check_precision(config: TrainerConfig, hf: HFConfig, *, te: bool = False) -> None:
    """Raise ValueError, with the remedy, for weights or inputs that a rank cannot round like the rollout. `te`: the
    model is built from TransformerEngine's modules."""
    if (spec := trained_spec(config, hf)) is None:
        return
    _refuse_te(config, te)
    tensors, covered = family_of(hf).bind(hf, mtp=config.mtp_coefficient > 0), 0
    for entry in tensors.entries:
        for index in range(len(entry.hf)):  # one tensor of each kind: other layers have the same shape
            places = (place for place in places_of(tensors, entry) if place.index == index)
            if place := next((p for p in places if spec.covers(p.hf_name, p.shape)), None):
                _check_place(config, place, make_codec(spec))
                covered += 1
    if config.precision.activations != "none":
        _refuse_mixed(tensors, spec)
    if not covered:
        raise ValueError(
            f"precision.format = {spec.format.value!r} quantizes no tensor of this model: check precision.scope and "
            "config.json's ignored modules, or set precision.qat = false and precision.activations = 'none'"
        )


def places_of(tensors: TensorMap, entry: Entry) -> Iterator[Place]:
    """Every Hugging Face tensor of one entry."""
    for layer in tensors.layers_of(entry):
        for expert in range(tensors.experts_of(entry)):
            depth = tensors.depth(layer)
            yield from tensors.places_in(entry.megatron.format(i=layer, e=expert, j=depth))


def _refuse_mixed(tensors: TensorMap, spec: QuantSpec) -> None:
    """Raise ValueError for linears of one entry that are not all quantized: Megatron computes them as one linear with
    one input, and engines do so for experts."""
    for entry in tensors.entries:
        first: dict[int | None, tuple[bool, str]] = {}
        for place in places_of(tensors, entry):
            quantized = spec.covers(place.hf_name, place.shape)
            other_is, other = first.setdefault(place.layer, (quantized, place.hf_name))
            if quantized != other_is:
                one, rest = (place.hf_name, other) if quantized else (other, place.hf_name)
                raise ValueError(
                    f"precision.activations: config.json's quantization_config quantizes {one}, not {rest}, but "
                    "these are computed as one linear with one input: set precision.activations = 'none', or "
                    "start from the BF16 checkpoint"
                )


def _refuse_te(config: TrainerConfig, te: bool) -> None:
    kernels, precision = config.kernels, config.precision
    if kernels.fp8 != "none":
        key = "qat = true" if precision.qat else f"activations = {precision.activations!r}"
        raise ValueError(
            f"kernels.fp8 = {kernels.fp8!r} with precision.{key}: TransformerEngine does not quantize like the "
            "rollout; set kernels.fp8 = 'none'"
        )
    if te and precision.activations != "none":
        raise ValueError(
            f"precision.activations = {precision.activations!r} needs megatron's local modules, but this run uses "
            "TransformerEngine's: set kernels.spec = 'local', or precision.activations = 'none'"
        )


def _check_place(config: TrainerConfig, place: Place, codec: Codec) -> None:
    name, (rows, columns), entry = place.hf_name, place.shape, place.entry
    codec.layout(place.shape, name)  # raises if the columns are not a multiple of the group
    codec.check_bundle(name, codec.bundle_of(name))  # raises for attention in NVFP4
    key = "etp" if entry.per_expert else "tp"
    ranks = config.parallel.etp if entry.per_expert else config.parallel.tp
    if entry.split is Split.REPLICATED:
        ranks = 1
    bn, bk = codec.block
    what, size, block = ("columns", columns, bk) if entry.split is Split.ROW else ("rows", rows, bn)
    if ranks > 1 and size // ranks % block:
        raise ValueError(
            f"precision.qat: {name} has {size} {what}, {size // ranks} on each of parallel.{key} = {ranks} ranks, "
            f"which would split blocks of {bn} x {bk}: lower parallel.{key}"
            + (", and distribute the experts with parallel.ep" if entry.per_expert else "")
        )
    if config.precision.activations == "none":
        return
    held, group = columns // (ranks if entry.split is Split.ROW else 1), activation_codec(codec.spec).block[1]
    if held % group:
        divided = f" (parallel.{key} = {ranks})" if held < columns else ""
        raise ValueError(
            f"precision.activations = {config.precision.activations!r}: {name} has {held} inputs on a rank{divided}, "
            f"not a multiple of the {group} that share a scale; "
            + (f"lower parallel.{key}, or " if divided else "")
            + "set precision.activations = 'none'"
        )

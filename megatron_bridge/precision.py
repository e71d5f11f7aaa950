"""The grid that quantization-aware training rounds to, and whether this run can: told from config.json alone, before
any process starts. Free of megatron.

A rank quantizes the part of a weight that it holds, by itself. That is the whole weight's quantization as long as no
block of elements that share a scale lies on two ranks: a layout which would cut one is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_bridge.config import TrainerConfig
from megatron_bridge.families.base import Entry, HFConfig, Place, Split, TensorMap
from megatron_bridge.families.registry import family_of
from quant.codec import Codec
from quant.hf_config import spec_from_hf
from quant.qat import activation_codec
from quant.registry import make_codec
from quant.spec import QuantSpec

_MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def trained_spec(config: TrainerConfig, hf: HFConfig) -> QuantSpec | None:
    """Of the weights that the rollout is served: the checkpoint's own where config.json has one, else what
    `config.precision` says. None where the trainer rounds neither weights nor activations.

    Raises ValueError where the two differ.
    """
    precision = config.precision
    if not precision.qat and precision.activations == "none":
        return None
    asked, stored = precision.spec(), spec_from_hf(hf)
    assert asked is not None, "bf16 has neither qat nor activations"
    if stored is None:
        return asked
    if stored.format is not asked.format:
        raise ValueError(
            f"precision.format = {asked.format.value!r}, but config.json's quantization_config stores "
            f"{stored.format.value!r}: set precision.format = {stored.format.value!r}, or quantize the checkpoint anew"
        )
    if precision.block is not None and stored.block != asked.block:
        raise ValueError(
            f"precision.block = {list(asked.block)}, but config.json's quantization_config has blocks of "
            f"{list(stored.block)}: what is trained on one grid and served on another is not trained at all; remove "
            "precision.block, or quantize the checkpoint anew"
        )
    if precision.scope is not None:
        _check_scope(config, hf, asked, stored)
    return stored


def check_precision(config: TrainerConfig, hf: HFConfig) -> None:
    """Raises ValueError, with the remedy, for weights or inputs that no rank could round as the rollout does."""
    if (spec := trained_spec(config, hf)) is None:
        return
    _refuse_te(config)
    tensors, covered = _tensors(config, hf), 0
    for entry in tensors.entries:
        for part in range(len(entry.hf)):  # one of each kind: in other layers it has the same shape
            places = (place for place in places_of(tensors, entry) if place.part == part)
            if place := next((p for p in places if spec.covers(p.hf_name, p.shape)), None):
                _check_place(config, place, make_codec(spec))
                covered += 1
    if not covered:
        raise ValueError(
            f"precision.format = {spec.format.value!r} quantizes no tensor of this model: look at precision.scope and "
            "config.json's ignored modules, or set precision.qat = false and precision.activations = 'none'"
        )


def places_of(tensors: TensorMap, entry: Entry) -> Iterator[Place]:
    """Every Hugging Face tensor of one line of the table."""
    for layer in tensors.layers_of(entry):
        for expert in range(tensors.experts_of(entry)):
            depth = tensors.depth(layer)
            yield from tensors.parts_of(entry.megatron.format(i=layer, e=expert, j=depth))


def _tensors(config: TrainerConfig, hf: HFConfig) -> TensorMap:
    return family_of(hf).bind(hf, mtp=config.mtp_coefficient > 0)


def _check_scope(config: TrainerConfig, hf: HFConfig, asked: QuantSpec, stored: QuantSpec) -> None:
    for place in _tensors(config, hf).places():
        name, shape = place.hf_name, place.shape
        if asked.covers(name, shape) != (quantized := stored.covers(name, shape)):
            raise ValueError(
                f"precision.scope = {config.precision.scope!r}, but config.json's quantization_config "
                f"{'quantizes' if quantized else 'leaves out'} {name}: remove precision.scope, the checkpoint decides"
            )


def _refuse_te(config: TrainerConfig) -> None:
    kernels = config.kernels
    given = "spec = 'te'" if kernels.spec == "te" else f"fp8 = {kernels.fp8!r}" if kernels.fp8 != "none" else ""
    if given:
        key = "qat = true" if config.precision.qat else f"activations = {config.precision.activations!r}"
        raise ValueError(
            f"kernels.{given} with precision.{key}: TransformerEngine's modules quantize by their own rules, not by "
            "the rollout's; set kernels.spec = 'auto' and kernels.fp8 = 'none'"
        )


def _check_place(config: TrainerConfig, place: Place, codec: Codec) -> None:
    name, (rows, columns), entry = place.hf_name, place.shape, place.entry
    codec.layout(place.shape, name)  # refuses columns that are no multiple of the group
    if codec.shared_amax and not name.endswith(_MLP):
        raise ValueError(
            f"precision.qat with {codec.spec.format.value} and {name}: it shares one scale of the whole tensor with "
            "others of its layer, which is trained for gate_proj, up_proj and down_proj alone; set precision.scope = "
            "'experts', or leave attention out of the checkpoint's quantization"
        )
    key = "etp" if entry.per_expert else "tp"
    ranks = config.parallel.etp if entry.per_expert else config.parallel.tp
    if entry.split is Split.REPLICATED:
        ranks = 1
    bn, bk = codec.block
    what, size, block = ("columns", columns, bk) if entry.split is Split.ROW else ("rows", rows, bn)
    if ranks > 1 and size // ranks % block:
        raise ValueError(
            f"precision.qat: {name} has {size} {what}, {size // ranks} on each of parallel.{key} = {ranks} ranks, "
            f"which cuts blocks of {bn} x {bk}: lower parallel.{key}"
            + (", and spread the experts by parallel.ep" if entry.per_expert else "")
        )
    if config.precision.activations == "none":
        return
    held, group = columns // (ranks if entry.split is Split.ROW else 1), activation_codec(codec.spec).block[1]
    if held % group:
        divided = f" (parallel.{key} = {ranks})" if held < columns else ""
        raise ValueError(
            f"precision.activations = {config.precision.activations!r}: {name} takes {held} inputs on a rank{divided}, "
            f"not a multiple of the {group} that share a scale; "
            + (f"lower parallel.{key}, or " if divided else "")
            + "set precision.activations = 'none'"
        )

"""Rejects weights and formats that the rollout engine of a run cannot serve, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_bridge.config import PrecisionConfig
from megatron_bridge.families.base import Split
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.precision import served_spec
from miles_like.run.setup.vllm_support import check_vllm_model
from quant.registry import codec_or_none
from quant.spec import QuantSpec
from rollout.config import EmbeddedFlags, RolloutConfig, SGLangFlags
from rollout.embedded.families.registry import architecture_of
from rollout.embedded.model.slices import Slices
from rollout.embedded.model.weights import WeightStore
from rollout.sglang.format_support import check_served


def check_engine(
    rollout: RolloutConfig, precision: PrecisionConfig, hf: Mapping[str, Any], *, gpus_per_node: int = 0
) -> None:
    """Raises ValueError, with the remedy, for weights that the run's engine cannot serve, replace or divide."""
    spec = served_spec(precision, hf)
    check_shapes(hf, spec)
    check_served(rollout.engine, spec, rollout.sglang)
    if rollout.engine == "embedded":
        check_ranks(rollout.embedded, hf, spec)
    if rollout.engine == "vllm":
        check_vllm_model(hf, gpus_per_node=gpus_per_node)
    if rollout.engine == "sglang":
        check_layers(hf)
        check_engine_shards(rollout.sglang, hf, spec)
        check_attention(rollout.sglang, hf)


def check_ranks(flags: EmbeddedFlags, hf: Mapping[str, Any], spec: QuantSpec | None) -> None:
    """Raises ValueError, with the remedy, for a model that does not divide over the ranks of an embedded server."""
    if flags.tp_size == flags.ep_size == 1:
        return
    slices = Slices(arch=architecture_of(hf), tp=flags.tp_size, ep=flags.ep_size)
    try:
        slices.check()
        for rank in range(flags.tp_size):
            WeightStore(slices.arch, spec, slices.of(rank))
    except ValueError as e:
        raise ValueError(f"rollout.embedded.tp_size, ep_size = {flags.tp_size}, {flags.ep_size}: {e}") from None


def check_attention(flags: SGLangFlags, hf: Mapping[str, Any]) -> None:
    """Raises ValueError for an attention backend that is not deterministic for this model although `flags` request
    deterministic inference."""
    latent = family_of(hf).transformer_config(hf).get("multi_latent_attention")
    if flags.enable_deterministic_inference and flags.attention_backend == "flashinfer" and latent:
        raise ValueError(
            "rollout.sglang.attention_backend = 'flashinfer' is not deterministic for latent attention: set it to "
            "'fa3' (Hopper) or 'triton', or enable_deterministic_inference = false"
        )


def check_layers(hf: Mapping[str, Any]) -> None:
    """Raises ValueError for a Qwen3-MoE with dense layers. Stock SGLang 0.5.23 builds expert layers in their place and
    never loads the weights of these, so its log-probabilities are nan."""
    if hf.get("model_type") != "qwen3_moe":
        return
    family = family_of(hf)
    layers, routed = family.num_layers(hf), len(family.moe_layers(hf))
    if routed < layers:
        raise ValueError(
            f"config.json has experts in {routed} of {layers} layers (mlp_only_layers, decoder_sparse_step), but "
            "stock SGLang supports Qwen3-MoE only with experts in every layer: set rollout.engine = 'embedded'"
        )


def check_shapes(hf: Mapping[str, Any], spec: QuantSpec | None) -> None:
    """Raises ValueError, with the remedy, for a weight of a shape that the format cannot hold (naming both numbers),
    and for a weight that is quantized without another weight that has the same scale."""
    codec = codec_or_none(spec)
    if codec is None or spec is None:
        return
    kinds = family_of(hf).bind(hf).kinds(each_expert=spec.may_split_experts)
    covered = {p.hf_name: p.shape for p, _ in kinds if spec.covers(p.hf_name, p.shape)}
    for name, shape in covered.items():
        codec.layout(shape, name)
        if not covered.keys() >= set(codec.bundle_of(name)):
            codec.check_bundle(name, covered)


def check_engine_shards(flags: SGLangFlags, hf: Mapping[str, Any], spec: QuantSpec | None) -> None:
    """Checks that tp_size is a multiple of ep_size and (with enable_dp_attention) of dp_size, that an SGLang server can
    multiply by the quantized weights with the scales as stored, and that sharding over its ranks cuts no block or
    group.

    Raises ValueError; for a division, with both numbers. SGLang and vLLM detect this error only while they load.
    """
    for key, part in (("ep_size", flags.ep_size), ("dp_size", flags.dp_size if flags.enable_dp_attention else 1)):
        if flags.tp_size % part:
            raise ValueError(
                f"rollout.sglang.tp_size = {flags.tp_size} is not divisible by {key} = {part}: choose a divisor"
            )
    codec = codec_or_none(spec)
    if spec is None or codec is None:
        return
    tensors, seen = family_of(hf).bind(hf), set[tuple[int, int]]()
    for place, _ in tensors.kinds(each_expert=spec.may_split_experts):
        entry, name, shape = place.entry, place.hf_name, place.shape
        if (id(entry), place.index) in seen or not spec.covers(name, shape):
            continue
        seen.add((id(entry), place.index))  # one of each kind: in other layers it has the same shape
        codec.check_bundle(name, codec.bundle_of(name))
        key, ranks = _engine_ranks(name, flags)
        if entry.split is Split.REPLICATED or ranks == 1:
            continue
        if entry.split is Split.QKV and place.index > 0 and tensors.dims["kv_heads"] < ranks:
            continue  # whole key/value heads are repeated
        axis = 1 if entry.split is Split.ROW else 0
        size, block = shape[axis], spec.block[axis]
        if size % (ranks * block):
            raise ValueError(
                f"{name} {list(shape)} divided over {ranks} ranks of a server gives each {size / ranks:g} "
                f"{'columns' if axis else 'rows'}, which is not a multiple of {spec.format}'s block of {block}: "
                f"{key}"
            )


def _engine_ranks(name: str, flags: SGLangFlags) -> tuple[str, int]:
    """(remedy, ranks that divide a linear) in SGLang, whose rules differ by kind of layer."""
    lower = "lower rollout.sglang.tp_size"
    if ".self_attn." in name:
        return f"{lower}, or set enable_dp_attention", flags.tp_size // (
            flags.dp_size if flags.enable_dp_attention else 1
        )
    if ".experts." in name:
        return f"{lower}, or raise rollout.sglang.ep_size", flags.tp_size // flags.ep_size
    if "shared_expert" in name:
        return f"{lower}, or set moe_a2a_backend", 1 if flags.moe_a2a_backend != "none" else flags.tp_size
    return f"{lower}, or set rollout.sglang.moe_dense_tp_size = 1", flags.moe_dense_tp_size or flags.tp_size

"""Checks, before any process starts, that a model can be laid out over the ranks. Imports no megatron.

A layout that makes megatron-core 0.16.1 crash on every rank (or, at worst, run incorrectly) is one error here, with
both numbers and the remedy.
"""

from __future__ import annotations

from megatron_bridge.config import ParallelConfig
from megatron_bridge.families.base import HFConfig
from megatron_bridge.families.keywords import TransformerKeywords
from megatron_bridge.families.registry import family_of


def check_world(config: ParallelConfig, world_size: int) -> None:
    """Raise ValueError when `world_size` trainer ranks do not match the layout."""
    if config.world_size != world_size:
        raise ValueError(
            f"parallel.tp * pp * cp * dp = {config.world_size}, but {world_size} trainer ranks were started: "
            f"set parallel.dp so that the product is {world_size}"
        )


def check_layout(config: ParallelConfig, hf: HFConfig) -> None:
    """Raise ValueError when the model of this config.json does not fit the layout, or cannot be trained at all."""
    family = family_of(hf)
    family.bind(hf)  # raises for options that cannot be trained
    architecture = family.transformer_config(hf)
    _check_tensor_parallel(config, architecture, family.vocab_size(hf))
    _check_experts(config, architecture)
    _check_stages(config, architecture["num_layers"])


def _check_tensor_parallel(config: ParallelConfig, model: TransformerKeywords, vocab: int) -> None:
    experts, tp = model.get("num_moe_experts"), config.tp
    if tp > 1 and not config.sequence_parallel:
        raise ValueError(
            f"parallel.sequence_parallel = false with parallel.tp = {tp}: each of the {tp} tensor-parallel ranks would "
            f"route every token{f' over the {experts} experts' if experts else ''}; set it to true"
        )
    kv_heads = None if model.get("multi_latent_attention") else model.get("num_query_groups")
    widths = {
        "attention heads": model["num_attention_heads"],
        "key-value heads": kv_heads,
        "rows of the vocabulary": vocab,
        "channels of the dense MLP": model["ffn_hidden_size"] if _has_dense(model) else None,
        "channels of the shared experts": model.get("moe_shared_expert_intermediate_size"),
    }
    for what, width in widths.items():
        if width is not None and width % tp:
            raise ValueError(f"{width} {what} are not divisible by parallel.tp = {tp}: choose a divisor")


def _has_dense(model: TransformerKeywords) -> bool:
    """Whether some layer has an MLP without experts."""
    return model.get("num_moe_experts") is None or not all(model.get("moe_layer_freq") or ())


def _check_experts(config: ParallelConfig, model: TransformerKeywords) -> None:
    experts = model.get("num_moe_experts")
    for name, size in (("ep", config.ep), ("etp", config.etp)):
        if experts is None and size > 1:
            raise ValueError(f"parallel.{name} = {size}, but the model has no experts: set parallel.{name} = 1")
    if experts is None:
        return
    if experts % config.ep:
        raise ValueError(f"{experts} experts are not divisible by parallel.ep = {config.ep}: choose a divisor")
    width = model["moe_ffn_hidden_size"]
    if width % config.etp:
        raise ValueError(
            f"{width} channels of an expert are not divisible by parallel.etp = {config.etp}: choose a divisor"
        )


def _check_stages(config: ParallelConfig, layers: int) -> None:
    if config.vpp > 1 and config.pp == 1:
        raise ValueError(
            f"parallel.vpp = {config.vpp} needs stages to interleave, but parallel.pp = 1: set parallel.vpp = 1"
        )
    ends = [n for n in (config.first_stage_layers, config.last_stage_layers) if n is not None]
    if config.pp == 1 and ends:
        raise ValueError("parallel.first_stage_layers and last_stage_layers need parallel.pp > 1: remove them")
    if config.vpp > 1 and config.pp == len(ends):  # megatron's get_transformer_layer_offset divides by the others
        raise ValueError(
            f"parallel.first_stage_layers and last_stage_layers with parallel.pp = {config.pp} leave no stage "
            f"between them, which megatron needs to place the layers of parallel.vpp = {config.vpp} virtual "
            "stages: remove one of them, or set parallel.vpp = 1"
        )
    between, stages = layers - sum(ends), config.pp - len(ends)
    if between < stages or (between if not stages else between % stages):
        raise ValueError(
            f"{between} of {layers} layers cannot be divided over {stages} pipeline stages: set "
            "parallel.first_stage_layers / last_stage_layers so that the rest is divisible, or lower parallel.pp"
        )
    for count in [*ends, between // stages if stages else 0]:
        if count % config.vpp:
            raise ValueError(
                f"{count} layers of a pipeline stage (of {layers} layers) cannot be divided over parallel.vpp = "
                f"{config.vpp} virtual stages: choose a divisor"
            )

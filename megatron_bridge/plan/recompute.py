"""Selects the activations to recompute in backward. Imports no megatron and needs no CUDA."""

from __future__ import annotations

from megatron_bridge.config import TrainerConfig
from megatron_bridge.families.keywords import TransformerKeywords


def recompute_settings(config: TrainerConfig, transformer: TransformerKeywords) -> TransformerKeywords:
    """Keyword arguments for megatron's TransformerConfig; `transformer`: those that model and layout determine.

    "selective" without names selects modules that are cheap to recompute for the memory they use: core attention, MLA's
    up projections, and the experts. Raises ValueError for a name that does not fit the model.
    """
    if config.recompute == "none":
        return {}
    if config.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    fitting = _fitting(transformer)
    wrong = sorted(set(config.recompute_modules) - set(fitting))
    if wrong:
        raise ValueError(f"recompute_modules: {wrong} do not exist in this model: choose from {fitting}")
    default = [name for name in fitting if name in ("core_attn", "mla_up_proj", "moe")]
    return {"recompute_granularity": "selective", "recompute_modules": list(config.recompute_modules) or default}


def routes_again(transformer: TransformerKeywords) -> bool:
    """Whether routers run again in backward."""
    kind = transformer.get("recompute_granularity")
    return kind == "full" or (kind == "selective" and "moe" in transformer["recompute_modules"])


def _fitting(transformer: TransformerKeywords) -> list[str]:
    """Megatron's names of the model's modules that can be recomputed."""
    moe = transformer.get("num_moe_experts") is not None
    fits = {
        "core_attn": True,
        "layernorm": True,
        "mla_up_proj": bool(transformer.get("multi_latent_attention")),
        "mlp": not moe or 0 in transformer.get("moe_layer_freq", []),  # of dense layers
        "moe": moe,
        "moe_act": bool(transformer.get("moe_grouped_gemm")),
        "shared_experts": moe
        and transformer.get("moe_shared_expert_intermediate_size") is not None
        and not transformer.get("moe_shared_expert_overlap"),
    }
    return [name for name, ok in fits.items() if ok]

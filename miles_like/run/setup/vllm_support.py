"""Rejects models that stock vLLM 0.32 does not serve correctly, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_bridge.families.registry import family_of

# of vLLM's attention on CPUs, v1/attention/backends/cpu_attn.py
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_OTHERS = "set rollout.engine = 'embedded' or 'sglang'"


def check_vllm_model(hf: Mapping[str, Any], *, gpus_per_node: int) -> None:
    """Raises ValueError, with the remedy, for a model that a vLLM server loads, reloads or computes wrongly."""
    family = family_of(hf)
    latent = family.transformer_config(hf).get("multi_latent_attention")
    if hf.get("model_type") == "deepseek_v3" and hf.get("topk_method") != "noaux_tc":
        raise ValueError(
            f"config.json has topk_method = {hf.get('topk_method')!r}, and vLLM then does not load "
            'e_score_correction_bias: add "topk_method": "noaux_tc" and "scoring_func": "sigmoid" to it'
        )
    if gpus_per_node:
        return
    if latent:
        raise ValueError(
            "with latent attention on CPUs (cluster.gpus_per_node = 0), vLLM 0.32 computes log-probabilities "
            f"that differ from the model's by up to 0.9 nats: {_OTHERS}"
        )
    if layers := family.moe_layers(hf):
        raise ValueError(
            f"config.json has {len(layers)} layers with experts, for which vLLM 0.32 on CPUs "
            f"(cluster.gpus_per_node = 0) neither repacks published weights nor returns routes: {_OTHERS}"
        )
    if hf.get("tie_word_embeddings"):
        raise ValueError(
            "config.json has tie_word_embeddings = true, and vLLM 0.32 on CPUs (cluster.gpus_per_node = 0) keeps the "
            f"old output layer of such a model when it loads published weights: {_OTHERS}"
        )
    size = int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])
    if size not in _CPU_HEADS:
        raise ValueError(
            f"config.json has attention heads of {size} values, but vLLM 0.32 on CPUs (cluster.gpus_per_node = 0) "
            f"has kernels only for {', '.join(map(str, _CPU_HEADS))}: {_OTHERS}"
        )

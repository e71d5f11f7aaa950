"""Models that stock vLLM 0.32 does not serve right, refused before anything is started."""

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
            f"config.json has topk_method = {hf.get('topk_method')!r}, and vLLM then has no e_score_correction_bias "
            'to load: add "topk_method": "noaux_tc" and "scoring_func": "sigmoid" to it'
        )
    if gpus_per_node:
        return
    if latent:
        raise ValueError(
            "vLLM 0.32 computes other log-probabilities than the model's with latent attention on CPUs "
            f"(cluster.gpus_per_node = 0), by up to 0.9 nats: {_OTHERS}"
        )
    if layers := family.moe_layers(hf):
        raise ValueError(
            f"config.json has {len(layers)} layers with experts, which vLLM 0.32 on CPUs (cluster.gpus_per_node = 0) "
            f"does not prepare again when it loads published weights, and whose routes it does not return: {_OTHERS}"
        )
    if hf.get("tie_word_embeddings"):
        raise ValueError(
            "config.json has tie_word_embeddings = true, and vLLM 0.32 on CPUs (cluster.gpus_per_node = 0) keeps the "
            f"old output layer of such a model when it loads published weights: {_OTHERS}"
        )
    size = int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])
    if size not in _CPU_HEADS:
        raise ValueError(
            f"config.json has attention heads of {size} values, vLLM 0.32 on CPUs (cluster.gpus_per_node = 0) has "
            f"kernels for {', '.join(map(str, _CPU_HEADS))}: {_OTHERS}"
        )

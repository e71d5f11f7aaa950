"""Random DeepSeek-V3 checkpoints, made by transformers, for the embedded engine's tests, and ways to drive it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from miles_like.types import SamplingParams
from rollout.embedded.engine import Engine, EngineLimits
from rollout.embedded.requests import Completed, PromptSpec
from rollout.embedded.service import Service

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def oracle(seed: int = 0, **changes: Any) -> DeepseekV3ForCausalLM:
    """fp32, with a random expert bias and random norms, so that a term left out shows."""
    torch.manual_seed(seed)
    config = {k: (dict(v) if isinstance(v, dict) else v) for k, v in (BASE | changes).items()}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**config)).eval()
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            if name.endswith("e_score_correction_bias"):
                p.normal_(0, 0.2)
    return model


def save(model: DeepseekV3ForCausalLM, path: Path) -> Path:
    """A Hugging Face directory, weights under the names of DeepSeek's own checkpoints."""
    model.save_pretrained(path)
    return path


def service(path: Path, **limits: int) -> Service:
    return Service(path, EngineLimits(**({"max_total_tokens": 2048, "context_length": 256} | limits)))


def spec(ids: list[int], **changes: Any) -> PromptSpec:
    """One prompt; sampling keys and request keys in one."""
    keys = {"max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "sampling_seed"}
    params = {"max_new_tokens": 12, "sampling_seed": 7} | {k: v for k, v in changes.items() if k in keys}
    rest = {"rid": "r", "ignore_eos": True, "routing_start": 0} | {k: v for k, v in changes.items() if k not in keys}
    return PromptSpec(token_ids=tuple(ids), sampling=SamplingParams(**params), **rest)


def submit(engine: Engine, *specs: PromptSpec) -> list[list[Completed]]:
    """The list fills, a group each, as the engine steps; in the order of `specs` when all are done."""
    out: list[list[Completed]] = [[] for _ in specs]
    for i, s in enumerate(specs):
        engine.submit(s, out[i].extend)
    return out


def run(engine: Engine, *specs: PromptSpec) -> list[list[Completed]]:
    out = submit(engine, *specs)
    while engine.step():
        pass
    assert engine.cache.free_pages == engine.cache.pages, "pages leaked"
    return out

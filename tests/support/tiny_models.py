"""Small models of every family for tests: configs, random checkpoints, and one rank's Megatron model of them.

Imports megatron-core only inside the functions that run in a rank's own process.
"""

from __future__ import annotations

import copy
import gc
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.families.registry import family_of
from miles_like.hf.checkpoint import write_hf

_built: list[Any] = []  # chunks of this process's model
_TINY = Path(__file__).parents[2] / "configs" / "tiny" / "model.json"


def tiny(**changes: Any) -> dict[str, Any]:
    """configs/tiny/model.json with some keys changed."""
    return {**json.loads(_TINY.read_text()), **changes}


def tiny_kimi(**changes: Any) -> dict[str, Any]:
    """A Kimi K2 of the same size: one group, one dense layer, and a ramp of yarn that is a step."""
    base = tiny(
        model_type="kimi_k2",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        rope_theta=50000.0,
        rope_scaling={
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    return {**base, **changes}


_DEEPSEEK = {
    "tiny": tiny(),
    "no_q_lora_no_yarn": tiny(q_lora_rank=None, rope_scaling=None, n_shared_experts=2, routed_scaling_factor=2.5),
    "one_group": tiny(
        n_group=1,
        topk_group=1,
        num_hidden_layers=4,
        first_k_dense_replace=2,
        rope_theta=50000.0,
        rope_scaling={
            "type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,  # unlike mscale_all_dim: cos and sin are scaled too
            "mscale_all_dim": 1.0,
        },
    ),
    "kimi": tiny_kimi(),
    "biases": tiny(attention_bias=True, n_shared_experts=0),
    "biases_tied": tiny(attention_bias=True, q_lora_rank=None, tie_word_embeddings=True),
}


def tiny_qwen(**changes: Any) -> dict[str, Any]:
    """A Qwen3-MoE of the size of the other: 4 heads of 48 over 2 key/value heads, where 4 * 48 is not hidden_size."""
    base = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.1,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1024,
        "rope_theta": 100.0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return {**base, **changes}


_QWEN = {
    "qwen": tiny_qwen(),
    "qwen_one_kv_head_tied": tiny_qwen(num_key_value_heads=1, tie_word_embeddings=True, mlp_only_layers=[1]),
    "qwen_every_head_unnormalized": tiny_qwen(num_key_value_heads=4, norm_topk_prob=False, rope_theta=50000.0),
    "qwen_every_second_layer": tiny_qwen(num_hidden_layers=4, decoder_sparse_step=2, num_attention_heads=8),
    "qwen_biases": tiny_qwen(attention_bias=True),
}

_EXPERTS = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob")
_EXPERT_LAYERS = ("decoder_sparse_step", "mlp_only_layers")


def tiny_dense(**changes: Any) -> dict[str, Any]:
    """A Qwen3 of the same size, without experts."""
    base = {key: value for key, value in tiny_qwen().items() if key not in _EXPERTS + _EXPERT_LAYERS}
    return {**base, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **changes}


_DENSE = {
    "qwen_dense": tiny_dense(),
    "qwen_dense_tied": tiny_dense(tie_word_embeddings=True, num_key_value_heads=1, head_dim=32),
    "qwen_dense_biases": tiny_dense(attention_bias=True, num_hidden_layers=4, rope_theta=1e6),
}


def tiny_glm(**changes: Any) -> dict[str, Any]:
    """A GLM-4.5 of the same size: half of a head's 48 channels turn, heads are normed, one dense layer, one expert for
    every token."""
    base = {key: value for key, value in tiny_qwen().items() if key not in ("num_experts", *_EXPERT_LAYERS)}
    return {
        **base,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 0,
        **changes,
    }


_GLM = {
    "glm": tiny_glm(),
    "glm_air": tiny_glm(use_qk_norm=False, num_key_value_heads=1, routed_scaling_factor=1.0),
    "glm_tied": tiny_glm(
        tie_word_embeddings=True,
        attention_bias=False,
        n_shared_experts=2,
        partial_rotary_factor=0.25,
        num_hidden_layers=4,
        first_k_dense_replace=2,
    ),
    "glm_groups": tiny_glm(n_group=4, topk_group=2, n_shared_experts=0, rope_theta=1e6),
}
CONFIGS = _DEEPSEEK | _QWEN | _DENSE | _GLM

# Apart from CONFIGS: for the comparisons with transformers. To what looks at names and shapes alone they are DeepSeeks.
KIMI = {
    "kimi_24_experts": tiny_kimi(n_routed_experts=24, num_experts_per_tok=8, n_shared_experts=2, rms_norm_eps=1e-3),
    "kimi_no_q_lora_tied": tiny_kimi(q_lora_rank=None, tie_word_embeddings=True),
    "kimi_two_dense_no_yarn": tiny_kimi(
        architectures=None,  # recognized by its model_type alone
        num_hidden_layers=4,
        first_k_dense_replace=2,
        rope_scaling=None,
        n_routed_experts=24,
        num_experts_per_tok=8,
    ),
}


def transformers_config(hf: dict[str, Any]) -> Any:
    """transformers' own config object, with plain attention."""
    from transformers import AutoConfig

    own = copy.deepcopy(hf)  # transformers' config classes edit what they are given
    kind = own.pop("model_type")
    if kind == "kimi_k2":  # its checkpoint's own code is DeepSeek-V3's
        kind = "deepseek_v3"
    return AutoConfig.for_model(kind, **own, attn_implementation="eager")


def transformers_model(hf: dict[str, Any]) -> Any:
    """transformers' own model of the config, random, in fp32 for computing; but MLA's latents are normed with the
    config's rms_norm_eps, as serving engines do, where transformers has 1e-6 whatever the config says."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(transformers_config(hf), dtype=torch.float32)
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = hf["rms_norm_eps"]
    return model


def random_tensors(hf: dict[str, Any], seed: int = 0, *, mtp: bool = False) -> dict[str, Tensor]:
    """Every Hugging Face tensor of the model, random, in the checkpoint's dtype; draft layers with their copies."""
    tensors, g = family_of(hf).bind(hf, mtp=mtp), torch.Generator().manual_seed(seed)
    out = {}
    for p in tensors.places():
        out[p.hf_name] = (0.05 * torch.randn(p.shape, generator=g)).to(tensors.dtype(p.entry))
        out |= {copy: out[p.hf_name].clone() for copy in tensors.copies_of(p.entry)}
    return out


def felt_tensors(hf: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """`random_tensors` with norms about 1 and wider matrices: what an expert gives is felt in the log-probs, which
    otherwise are those of a fair die."""
    return {n: 1 + w if n.endswith("norm.weight") else 3 * w for n, w in random_tensors(hf, seed).items()}


def write_checkpoint(path: Path, hf: dict[str, Any], tensors: dict[str, Tensor], shard_bytes: int = 5 << 30) -> Path:
    write_hf(path, iter(tensors.items()), hf, shard_bytes=shard_bytes)
    return path


def megatron_rank(
    hf: dict[str, Any],
    rank: int,
    world_size: int,
    port: int,
    dtype: str = "bfloat16",
    *,
    mtp: bool = False,
    **layout: int,
) -> tuple[list[Any], Any]:
    """(model chunks, parallel context) of this rank; `tests.support.spawn` processes only. Close with `leave`."""
    from megatron_bridge.device.device import init_device

    env = init_device()
    from megatron_bridge.config import OptimizerConfig, ParallelConfig, PrecisionConfig, ReplayConfig, TrainerConfig
    from megatron_bridge.device.parallel import init_parallel
    from megatron_bridge.model.build import build_model
    from megatron_bridge.plan.resolve import resolve

    config = TrainerConfig(
        hf_config="",
        parallel=ParallelConfig(**layout),
        precision=PrecisionConfig(),
        optimizer=OptimizerConfig(),
        replay=ReplayConfig(),
        params_dtype=dtype,
    )
    parallel = init_parallel(
        config.parallel,
        rank=rank,
        world_size=world_size,
        master_addr="127.0.0.1",
        master_port=port,
        backend=env.backend,
        seed=1,
        timeout_s=60,
    )
    resolved = resolve(config, hf, cuda=env.device.type == "cuda")
    if mtp:
        resolved.transformer["mtp_num_layers"] = family_of(hf).mtp_layers(hf)
    _built.extend(chunks := build_model(config, hf, resolved, parallel, env))
    return chunks, parallel


def leave() -> None:
    """Chunks built by `megatron_rank` are no more; modules inside them are."""
    from megatron_bridge.device.parallel import close_parallel

    for chunk in _built:
        vars(chunk).clear()  # as a trainer does: gradient hooks would hold it, and the groups' threads, for good
    _built.clear()
    close_parallel()
    gc.collect()


def sharded_state_dict(chunk: Any, parallel: Any) -> Any:
    from megatron_bridge.model.build import unwrap

    metadata = {"singleton_local_shards": False, "dp_cp_group": parallel.dp_cp_group}
    return unwrap(chunk).sharded_state_dict(metadata=metadata)


def load_converted(chunks: list[Any], parallel: Any, path: Path) -> None:
    """Stock load of a converted checkpoint; all parameters are set to -7 first, so none is right by chance."""
    from megatron.core import dist_checkpointing

    from megatron_bridge.model.build import unwrap

    for chunk in chunks:
        with torch.no_grad():
            for value in [*unwrap(chunk).parameters(), *unwrap(chunk).buffers()]:
                value.fill_(-7)
    # all chunks at once: what a last stage repeats of the first is no checkpoint's main copy
    wanted = {f"model{i}": sharded_state_dict(chunk, parallel) for i, chunk in enumerate(chunks)}
    state = dist_checkpointing.load(wanted, str(path))
    for i, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(state[f"model{i}"], strict=True)

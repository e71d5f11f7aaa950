"""Small models of every family for tests: configs, random checkpoints, and one rank's Megatron model of them.

Imports megatron-core only inside the functions that run in a rank's own process.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.families.registry import family_of
from miles_like.hf_checkpoint import write_hf

_TINY = Path(__file__).parents[2] / "configs" / "tiny" / "model.json"


def tiny(**changes: Any) -> dict[str, Any]:
    """configs/tiny/model.json with some keys changed."""
    return {**json.loads(_TINY.read_text()), **changes}


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
}


def tiny_qwen(**changes: Any) -> dict[str, Any]:
    """A Qwen3-MoE of the size of the other: 4 heads of 48 over 2 key/value heads, a head of its own size."""
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
}
CONFIGS = _DEEPSEEK | _QWEN


def transformers_model(hf: dict[str, Any]) -> Any:
    """transformers' own model of the config, random, in fp32 for computing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = copy.deepcopy(hf)  # transformers' config classes edit what they are given
    config = AutoConfig.for_model(own.pop("model_type"), **own, attn_implementation="eager")
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def random_tensors(hf: dict[str, Any], seed: int = 0, *, mtp: bool = False) -> dict[str, Tensor]:
    """Every Hugging Face tensor of the model, random, in the checkpoint's dtype; draft layers with their copies."""
    tensors, g = family_of(hf).bind(hf, mtp=mtp), torch.Generator().manual_seed(seed)
    out = {}
    for p in tensors.places():
        out[p.hf_name] = (0.05 * torch.randn(p.shape, generator=g)).to(tensors.dtype(p.entry))
        out |= {copy: out[p.hf_name].clone() for copy in tensors.copies_of(p.entry)}
    return out


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
    """(model chunks, parallel context) of this rank; `tests.spawn` processes only. Close with `leave`."""
    from megatron_bridge.device import init_device

    env = init_device()
    from megatron_bridge.config import OptimizerConfig, ParallelConfig, PrecisionConfig, ReplayConfig, TrainerConfig
    from megatron_bridge.model import build_model
    from megatron_bridge.parallel import init_parallel
    from megatron_bridge.resolve import resolve

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
    return build_model(config, hf, resolved, parallel, env), parallel


def leave() -> None:
    from megatron_bridge.parallel import close_parallel

    close_parallel()


def sharded_state_dict(chunk: Any, parallel: Any) -> Any:
    from megatron_bridge.model import unwrap

    metadata = {"singleton_local_shards": False, "dp_cp_group": parallel.dp_cp_group}
    return unwrap(chunk).sharded_state_dict(metadata=metadata)


def load_converted(chunks: list[Any], parallel: Any, path: Path) -> None:
    """Stock load of a converted checkpoint; all parameters are set to -7 first, so none is right by chance."""
    from megatron.core import dist_checkpointing

    from megatron_bridge.model import unwrap

    for chunk in chunks:
        with torch.no_grad():
            for value in [*unwrap(chunk).parameters(), *unwrap(chunk).buffers()]:
                value.fill_(-7)
    # all chunks at once: what a last stage repeats of the first is no checkpoint's main copy
    wanted = {f"model{i}": sharded_state_dict(chunk, parallel) for i, chunk in enumerate(chunks)}
    state = dist_checkpointing.load(wanted, str(path))
    for i, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(state[f"model{i}"], strict=True)

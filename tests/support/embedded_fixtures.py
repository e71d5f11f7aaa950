"""Random checkpoints of every family, made by transformers, for the embedded engine's tests, and ways to drive it."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from miles_like.types import SamplingParams
from rollout.embedded.engine.engine import Engine, EngineLimits
from rollout.embedded.engine.requests import Completed, PromptSpec
from rollout.embedded.server.service import Service
from rollout.embedded.server.worker import EngineWorker
from tests.support.spawn import free_port
from tests.support.tiny_models import transformers_model

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 4}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
BASE: dict[str, Any] = {
    **_COMMON,
    **_EXPERTS,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
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
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7},
}
QWEN: dict[str, Any] = {
    **_COMMON,
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "head_dim": 24,  # not hidden / heads
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
}
QWEN_MOE: dict[str, Any] = {
    **QWEN,
    **_EXPERTS,
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "norm_topk_prob": True,
}
GLM: dict[str, Any] = {
    **_COMMON,
    **_EXPERTS,
    "model_type": "glm4_moe",
    "num_key_value_heads": 2,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "attention_bias": True,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 0,
}


def oracle(seed: int = 0, base: dict[str, Any] = BASE, **changes: Any) -> Any:
    """fp32, with random expert biases, biases and norms, so that a term left out shows."""
    torch.manual_seed(seed)
    model = transformers_model(base | changes).eval()
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            if name.endswith("bias"):
                p.normal_(0, 0.2)
    return model


def save(model: Any, path: Path, config: dict[str, Any] | None = None) -> Path:
    """A Hugging Face directory, weights under the names of the published checkpoints; config.json is `config`, else as
    transformers writes it."""
    model.save_pretrained(path)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    whole = {n: t for n, t in tensors.items() if t.numel()}  # transformers' absent shared expert has width 0
    if len(whole) < len(tensors):
        save_file(whole, path / "model.safetensors", {"format": "pt"})
    return path


def with_values(values: dict[str, torch.Tensor], base: dict[str, Any] = BASE) -> Any:
    """transformers' model of these values, named as a checkpoint names them."""
    model = oracle(5, base)
    own = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        for name in (n for n in values if ".experts." not in n):
            own[name].copy_(values[name])
        for name, p in model.named_parameters():
            if ".experts." in name:  # stacked, and gate over up
                prefix, leaf = name.rsplit(".", 1)
                parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
                for e in range(len(p)):
                    p[e].copy_(torch.cat([values[f"{prefix}.{e}.{part}.weight"] for part in parts]))
    return model


def service(path: Path, weights: Any = "decoded", activations: Any = "none", **limits: Any) -> Service:
    wanted = EngineLimits(**({"max_total_tokens": 2048, "context_length": 256} | limits))
    return Service(path, wanted, weights=weights, activations=activations)


def spec(ids: list[int], **changes: Any) -> PromptSpec:
    """One prompt; sampling keys and request keys in one."""
    keys = {"max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "sampling_seed"}
    params = {"max_new_tokens": 12, "sampling_seed": 7} | {k: v for k, v in changes.items() if k in keys}
    rest: dict[str, Any] = {"rid": "r", "ignore_eos": True, "routing_start": 0}
    rest |= {k: v for k, v in changes.items() if k not in keys}
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


@contextmanager
def served(s: Service) -> Iterator[str]:
    """The URL of a server of it in threads of this process, once it answers."""
    import uvicorn

    from rollout.embedded.server.app import make_app

    worker = EngineWorker(s, threads=1)
    worker.start()
    port = free_port()
    app = make_app(worker, argparse.Namespace(model_path=str(s.model_path)))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
        worker.stop()


class Held:
    """Holds an engine once it has drawn `until` tokens, whenever that is, so that what comes then finds its requests in
    the middle. A call wakes it: raise `until` before."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.until = math.inf
        step = engine.step
        engine.step = lambda: engine.generated < self.until and step()  # type: ignore[method-assign]

    async def reached(self) -> None:
        async with asyncio.timeout(60):
            while self.engine.generated < self.until:
                await asyncio.sleep(0.002)

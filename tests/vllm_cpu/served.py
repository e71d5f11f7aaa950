"""Stock vLLM servers on CPU, and the checkpoints that they serve."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles_like.types import NamedTensor
from rollout.config import RolloutConfig, VLLMFlags
from rollout.sglang.servers import ServerLaunch
from tests.support.tiny_models import felt_tensors, write_checkpoint

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
SHAPES = {"moe": "qwen_moe.json", "dense": "qwen_vllm.json"}
START_S = 600.0
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def shape(kind: str) -> dict[str, Any]:
    """The config.json: experts in every layer, and attention heads of a size that vLLM has on CPUs."""
    found: dict[str, Any] = json.loads((ROOT / "configs" / "tiny" / SHAPES[kind]).read_text())
    return found | {"head_dim": 32} | ({"mlp_only_layers": []} if kind == "moe" else {})


def checkpoint(kind: str, path: Path, seed: int) -> dict[str, Tensor]:
    """Random BF16 weights, which are written to `path` too."""
    tensors = {name: tensor.bfloat16() for name, tensor in felt_tensors(shape(kind), seed).items()}
    write_checkpoint(path, shape(kind), tensors)
    return tensors


def launch(model: Path, logs: Path, **flags: Any) -> ServerLaunch:
    """A server that computes in fp32."""
    vllm = VLLMFlags(
        python=str(PYTHON),
        dtype="float32",
        gpu_memory_utilization=0.1,
        max_model_len=1024,
        max_num_seqs=64,
        enforce_eager=True,
        **flags,
    )
    config = RolloutConfig(engine="vllm", vllm=vllm, start_timeout_s=START_S)
    return ServerLaunch(model_path=model, config=config, log_dir=logs, return_routed_experts=False, env=VARIABLES)


class Reference:
    """transformers' model of a checkpoint, in fp32."""

    def __init__(self, path: Path) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.model = model.eval()

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int] | Tensor, temperature: float = 1.0) -> Tensor:
        """[S] fp32: log p of each token under logits / temperature, 0 for the first."""
        tokens = torch.as_tensor(ids)[None]
        logits = self.model(tokens).logits[0, :-1].float() / temperature
        own = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        return torch.cat([torch.zeros(1), own])


def stream(tensors: dict[str, Tensor]) -> list[NamedTensor]:
    """The weights as a trainer exports them."""
    return [NamedTensor(name, tensor) for name, tensor in tensors.items()]

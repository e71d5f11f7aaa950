"""A converted checkpoint of about a billion parameters says the same on CUDA as on the CPU, in fp32.

Needs some 40 GB of the host's memory, the model with gradients and optimizer twice over. Not covered: BF16, several
ranks, TransformerEngine's modules (test_trainer_cuda.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_bridge.convert.to_megatron import to_megatron
from megatron_bridge.families.registry import family_of
from tests.support import toy
from tests.support.spawn import run_ranks
from tests.support.tiny_models import random_tensors, tiny_qwen, write_checkpoint

BILLION = tiny_qwen(
    torch_dtype="float32",
    vocab_size=151_936,
    hidden_size=2048,
    moe_intermediate_size=768,
    intermediate_size=6144,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=32,
    num_experts_per_tok=8,
    rope_theta=1e6,
)
LENGTHS = (256, 100, 512)
BOUND = 1e-3  # of a log-prob: sums of 2,048 products in fp32, in another order


def _text() -> list[Any]:
    """One micro-batch, which every label but the first half's is scored in."""
    return [toy.pack([toy.sample(i, n, layers=()) for i, n in enumerate(LENGTHS)])]


def score(rank: int, world: int, port: int, hf: str, shards: Path, on_cuda: bool) -> torch.Tensor:
    """[T] fp32 log-probs of the text under the checkpoint, on the host."""
    if not on_cuda:
        torch.cuda.is_available = lambda: False  # before the trainer is imported
    torch.backends.cuda.matmul.allow_tf32 = False
    with toy.trainer(toy.config(hf, mode="off", kernels={"spec": "local"}), rank, world, port) as t:
        assert next(t.models[0].parameters()).is_cuda == on_cuda
        t.load_weights(shards)
        return t.logprobs(_text())[0].cpu()


def written(where: Path, hf: dict[str, Any]) -> tuple[str, Path]:
    """A random checkpoint of `hf` and its shards."""
    write_checkpoint(where / "hf", hf, random_tensors(hf))
    to_megatron(where / "hf", where / "shards")
    return str(where / "hf"), where / "shards"


def test_a_converted_checkpoint_scores_alike_on_cuda_and_cpu(tmp_path: Path) -> None:
    assert 0.9e9 < family_of(BILLION).parameter_count(BILLION) < 1.3e9
    at = written(tmp_path, BILLION)
    host, device = (run_ranks(score, 1, *at, on_cuda, timeout_s=900)[0] for on_cuda in (False, True))
    assert float(host.std()) > 0.01, "the log-probs say nothing"
    apart = float((host - device).abs().max())
    print(f"max abs log-prob difference, CUDA against CPU in fp32: {apart:.2e}")
    assert apart <= BOUND

"""The trainer's model must be the published model: with the same weights, Megatron's logits are transformers'.

One fp32 checkpoint goes through the project's converter and Megatron's stock loader on one side; transformers' own
model, which saved it, is the other. This holds the rotary convention, yarn's two mscales, the softmax scale, the order
of q / k / v inside the projections, group-limited routing with its bias, the gate normalization and scaling, the shared
experts. Weights are large enough, and biases and norms random, so that each of these moves the logits by 0.6 or more
(measured on transformers' side: yarn, mscale, interleaving, groups, bias, scaling), thousands of times the bound.
Not covered: bf16, other layouts than one rank, multi-token prediction, TransformerEngine's kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron_bridge.tiny_models import CONFIGS, leave, load_converted, megatron_rank, transformers_model
from tests.spawn import free_port, run_ranks

LENGTHS = (96, 33, 128)  # packed for Megatron, one at a time for transformers
BOUND = 1e-4


def _fp32(name: str) -> dict[str, Any]:
    return {**CONFIGS[name], "torch_dtype": "float32"}


def _tokens(vocab: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab, (n,), generator=g) for n in LENGTHS]


def _megatron_logits(rank: int, world_size: int, spare: int, jobs: list[tuple[str, str, int]]) -> list[Any]:
    """numpy [sum of LENGTHS, vocab] for each converted checkpoint."""
    answers = []
    for name, path, port in jobs:
        hf = _fp32(name)
        chunks, parallel = megatron_rank(hf, rank, world_size, port, dtype="float32")
        from megatron.core.packed_seq_params import PackedSeqParams

        from megatron_bridge.model import unwrap

        load_converted(chunks, parallel, Path(path))
        tokens = torch.cat(_tokens(hf["vocab_size"]))[None]
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        cu = torch.tensor([0, *LENGTHS]).cumsum(0).int()
        packed = PackedSeqParams("thd", cu, cu, cu, cu, max(LENGTHS), max(LENGTHS))
        model = unwrap(chunks[0]).eval()
        with torch.no_grad():
            answers.append(model(tokens, positions, None, packed_seq_params=packed)[0].numpy())
        leave()
    return answers


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """name -> (transformers', Megatron's), both [sum of LENGTHS, vocab] fp32."""
    from megatron_bridge.stream_convert import convert_checkpoint

    jobs, references = [], []
    for name in CONFIGS:
        hf, root = _fp32(name), tmp_path_factory.mktemp(name)
        torch.manual_seed(7)
        model = transformers_model(hf).eval()
        with torch.no_grad():
            for key, value in model.state_dict().items():
                value.add_(torch.randn(value.shape) * (0.3 if "norm" in key or "bias" in key else 0.05))
            references.append(torch.cat([model(t[None]).logits[0] for t in _tokens(hf["vocab_size"])]))
        model.save_pretrained(root / "hf")
        convert_checkpoint(root / "hf", root / "megatron")
        jobs.append((name, str(root / "megatron"), free_port()))
    (answers,) = run_ranks(_megatron_logits, 1, jobs)
    return {
        name: (reference, torch.from_numpy(answer))
        for name, reference, answer in zip(CONFIGS, references, answers, strict=True)
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_equal(name: str, logits: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    theirs, ours = logits[name]
    assert theirs.shape == ours.shape
    assert float(theirs.std()) > 0.1, "the logits say nothing"
    assert float((theirs - ours).abs().max()) <= BOUND

"""Law: trainer and engine, with inputs of quantized linears rounded on both sides, score a text alike.

Each side calls one function for weights and one for inputs, so that in fp32 only the order of sums is left between
them; a side that rounds other inputs, or other groups of them, is off by the rounding itself, many times that.
Not covered: bitwise equality, several ranks (test_qat.py), stock SGLang.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.types import MicroBatch, SamplingParams
from quant.hf_config import quantized_config
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.embedded.engine.engine import EngineLimits
from rollout.embedded.engine.requests import Completed, PromptSpec
from rollout.embedded.server.service import Service
from tests.support import toy
from tests.support.spawn import free_port, run_ranks
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

WIDE = tiny(
    torch_dtype="bfloat16",
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=2,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=64,
)
FORMATS = ("fp8", "fp8-ue8m0", "mxfp8")
IDS = [int(i) for i in torch.randint(2, 100, (24,), generator=torch.Generator().manual_seed(3))]


def _text() -> MicroBatch:
    n = len(IDS) - 1
    return MicroBatch(
        samples=("text",),
        tokens=torch.tensor(IDS[:-1]),
        labels=torch.tensor(IDS[1:]),
        positions=torch.arange(n),
        cu_seqlens=torch.tensor([0, n], dtype=torch.int32),
        loss_mask=torch.ones(n, dtype=torch.bool),
        advantages=torch.zeros(n),
        rollout_logprobs=torch.zeros(n),
        routing=None,
    )


def _trained(rank: int, world: int, port: int, where: str) -> dict[str, list[float]]:
    from megatron_bridge.convert.to_megatron import to_megatron

    out = {}
    for fmt in FORMATS:
        to_megatron(Path(where) / fmt, shards := Path(where) / f"{fmt}-shards")
        precision = {"format": fmt, "qat": True, "activations": "fp8"}
        cfg = toy.config(str(Path(where) / fmt), mode="off", precision=precision)
        with toy.trainer(cfg, rank, world, free_port()) as t:  # the store of the one before may listen still
            t.load_weights(shards)
            out[fmt] = t.logprobs([_text()])[0].tolist()
    return out


def _served(path: Path, activations: Any) -> Tensor:
    limits = EngineLimits(max_total_tokens=256, context_length=64)
    engine = Service(path, limits, weights="decoded", activations=activations).engine
    done: list[Completed] = []
    sampling = SamplingParams(max_new_tokens=0, sampling_seed=0)
    engine.submit(PromptSpec(token_ids=tuple(IDS), sampling=sampling, rid="r", logprob_start=0), done.extend)
    while engine.step():
        pass
    return torch.tensor(done[0].prompt_logprobs)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("sides")
    # larger experts than random ones, so that what they round is seen in the log-probs
    tensors = {name: w * 5 if ".experts." in name else w for name, w in random_tensors(WIDE).items()}
    for fmt in FORMATS:
        how = QuantSpec.of(QuantFormat(fmt))
        stored = dict(quantize_stream(tensors.items(), how))
        write_checkpoint(where / fmt, quantized_config(WIDE, how, list(tensors)), stored)
    return where


@pytest.fixture(scope="module")
def trained(home: Path) -> dict[str, list[float]]:
    return run_ranks(_trained, 1, str(home), keep=True)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("fmt", FORMATS)
def test_both_sides_score_alike(fmt: str, home: Path, trained: dict[str, list[float]]) -> None:
    ours = torch.tensor(trained[fmt])
    gap = (ours - _served(home / fmt, "fp8")).abs().max()
    assert gap < 5e-6
    off = (ours - _served(home / fmt, "none")).abs().max()
    assert off > 1e-4 and off > 20 * gap  # the law is not blind
